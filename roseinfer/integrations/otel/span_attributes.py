"""Attributes of the spans of a request. See `traces`."""

from collections.abc import Sequence
from math import isfinite

from roseinfer.core.slo import Rejection
from roseinfer.server.observe.verdict import Explanation
from roseinfer.server.request.job import (
    OBJECTIVES,
    Job,
    JobProgress,
    Outcome,
    PromptRun,
    SampleRecord,
    slo_class_name,
    worst_latencies,
)

Value = str | bool | int | float | Sequence[str]
Attributes = dict[str, Value]
_ROUTE = ("engine", "reason", "retries", "placed_again", "resumes")


def of_job(job: Job) -> Attributes:
    """Return the attributes of the request. Its prompts differ only in length; those of the first are used."""
    params = job.prompts[0].params
    found: dict[str, Value | None] = {
        "gen_ai.request.model": job.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.stop_sequences": params.stop or None,
        "gen_ai.request.stream": job.stream is not None,
        "gen_ai.request.choice.count": job.num_choices,
        "gen_ai.response.id": job.id,
        "gen_ai.response.model": job.model,
        "roseinfer.api": job.api,
        "roseinfer.slo.class": slo_class_name(job),
    }
    if job.meta.slo is not None:
        objectives = (job.meta.slo.ttft_s, job.meta.slo.tpot_s, job.meta.slo.e2e_s)
        found |= {f"roseinfer.slo.{name}_ms": _ms(limit) for name, limit in zip(OBJECTIVES, objectives, strict=True)}
    return _known(found)


def of_result(job: Job, progress: JobProgress, outcome: Outcome | None, rejection: Rejection | None) -> Attributes:
    """Return the attributes of the result: the worst latencies of all choices, and the route of the first prompt.

    `outcome`: None if the request was invalid.
    """
    usage = progress.usage()
    samples = [sample for run in progress.runs for sample in run.samples]
    firsts = [run.first_s - run.arrival_s for run in progress.runs if run.first_s is not None]
    result: dict[str, Value | None] = {
        "gen_ai.response.finish_reasons": [str(sample.finish_reason or "error") for sample in samples],
        "gen_ai.response.time_to_first_chunk": min(firsts, default=None),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "roseinfer.slo.outcome": None if outcome is None else str(outcome),
        "roseinfer.preemptions": max(sample.preemptions for sample in samples),
    }
    if job.has_objectives and outcome is not None:
        result["roseinfer.slo.met"] = outcome is Outcome.MET
        result["roseinfer.slo.missed"] = outcome.removeprefix("missed_") if outcome.startswith("missed_") else None
    drafts = progress.drafts()
    if drafts.drafted:
        result |= {"roseinfer.drafted_tokens": drafts.drafted, "roseinfer.accepted_tokens": drafts.accepted}
    route = next((run.route for run in progress.runs if run.route is not None), None)
    if route is not None:
        result |= {f"roseinfer.router.{name}": getattr(route, name) for name in _ROUTE}
    latencies = worst_latencies(progress.runs)
    if latencies is not None:
        result |= {f"roseinfer.seen.{name}_ms": _ms(value) for name, value in zip(OBJECTIVES, latencies, strict=True)}
    return _known(result) | _waits(samples) | ({} if rejection is None else _of_rejection(rejection))


def of_verdict(verdict: Explanation) -> Attributes:
    return _known({"roseinfer.why.verdict": verdict.name, "roseinfer.why.summary": verdict.summary})


def of_choice(phase: str, run: PromptRun, sample: SampleRecord) -> Attributes:
    """Return the attributes of the span of one phase of a choice."""
    if phase == "queue":
        return _waits([sample])
    if phase == "prefill":
        computed = run.prompt_tokens - run.cached_tokens
        return {"roseinfer.computed_tokens": computed} | _steps(sample, ("chunks",))
    return {"gen_ai.usage.output_tokens": sample.tokens, "roseinfer.preemptions": sample.preemptions} | _steps(
        sample, ("steps", "sat_out")
    )


def _waits(samples: Sequence[SampleRecord]) -> Attributes:
    """Return `roseinfer.wait.CAUSE_ms` and the predicted latencies of the choice that waited longest."""
    whys = [sample.why for sample in samples if sample.why is not None]
    if not whys:
        return {}
    why = max(whys, key=lambda why: sum(seconds for _, seconds in why.waited))
    waits: dict[str, Value | None] = {f"roseinfer.wait.{cause}_ms": _ms(seconds) for cause, seconds in why.waited}
    waits["roseinfer.predicted.ttft_ms"] = _ms(why.forecast.ttft_s)
    waits["roseinfer.predicted.tpot_ms"] = _ms(why.forecast.tpot_s)
    return _known(waits)


def _steps(sample: SampleRecord, names: Sequence[str]) -> Attributes:
    return {} if sample.why is None else {f"roseinfer.{name}": getattr(sample.why, name) for name in names}


def _of_rejection(rejection: Rejection) -> Attributes:
    return _known(
        {
            "roseinfer.refused.objective": rejection.reason,
            "roseinfer.refused.cause": str(rejection.cause),
            "roseinfer.refused.predicted_ttft_ms": _ms(rejection.predicted_ttft_s),
            "roseinfer.refused.attainable_ms": _ms(rejection.attainable_s),
            "roseinfer.refused.hopeless": rejection.hopeless,
        }
    )


def _ms(seconds: float | None) -> float | None:
    return round(seconds * 1000, 3) if seconds is not None and isfinite(seconds) else None


def _known(found: dict[str, Value | None]) -> Attributes:
    return {name: value for name, value in found.items() if value is not None}
