"""Request records as JSON, for `/v1/requests`, `usage.slo.why` and the console."""

from typing import Any

from roseinfer.core.outputs import COMPLETE
from roseinfer.core.slo import NO_CLASS, Cause, Forecast, Rejection, Slo
from roseinfer.server.observe.delays import waits_before_seat
from roseinfer.server.observe.milliseconds import ms
from roseinfer.server.observe.records import RequestEntry
from roseinfer.server.observe.verdict import verdict


def record_json(record: RequestEntry) -> dict[str, Any]:
    """Return the request object. Times in ms from arrival; null = unknown, or not yet."""
    slo, route = record.slo or Slo(), record.route
    return {
        "object": "request",
        "id": record.id,
        "request_id": record.request_id,
        "api": record.api,
        "model": record.model,
        "state": "live" if record.live else "ended",
        "stream": record.stream,
        "created": record.created_s,
        "class": NO_CLASS if record.slo is None else slo.class_name,
        "objectives": objectives_json(slo),
        "predicted": _predicted(record),
        "seen": _seen(record),
        "outcome": record.outcome,
        "finish": record.finish or None,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "choices": record.choices,
        "engine": record.engine,
        "routing": None
        if route is None
        else {
            "reason": route.reason,
            "retries": route.retries,
            "placed_again": route.placed_again,
            "resumes": route.resumes,
        },
        "why": why_json(record),
    }


def why_json(record: RequestEntry) -> dict[str, Any]:
    sample, found = record.worst, verdict(record)
    why = sample.why
    return {
        "verdict": found.name,
        "summary": found.summary,
        "waited_ms": {} if why is None else {cause.value: ms(seconds) for cause, seconds in why.waited},
        "preemptions": sample.preemptions,
        "chunks": 0 if why is None else why.chunks,
        "steps": 0 if why is None else why.steps,
        "sat_out": 0 if why is None else why.sat_out,
        "drafts": {proposer: tally._asdict() for proposer, tally in (sample.drafts or {}).items()},
        "refused": None if record.rejection is None else _refused(record.rejection),
        "timeline": timeline(record),
    }


def timeline(record: RequestEntry) -> list[dict[str, Any]]:
    """Return the phases of the worst sample in order, without gaps."""
    sample = record.worst
    seat_s, waits = waits_before_seat(record)
    phases, at_s = [], 0.0
    for cause, seconds in waits:
        phases.append(_phase("wait", cause, at_s, at_s + seconds))
        at_s += seconds
    if sample.first_s is None:
        has_seat = sample.scheduled_s is not None
        return [*phases, _phase("prefill", None, seat_s, record.age_s)] if has_seat else phases
    phases.append(_phase("prefill", None, seat_s, sample.first_s))
    until_s = record.age_s if record.live and not sample.finish else sample.last_s
    if until_s is not None and until_s > sample.first_s:
        phases.append(_phase("decode", None, sample.first_s, until_s))
    return phases


def _phase(phase: str, cause: Cause | None, from_s: float, to_s: float) -> dict[str, Any]:
    return {"phase": phase, "cause": cause, "from_ms": ms(from_s), "to_ms": ms(to_s)}


def _predicted(record: RequestEntry) -> dict[str, float | None]:
    """Return the policy's forecast from its first look at the request, or from its rejection."""
    forecast = Forecast() if record.worst.why is None else record.worst.why.forecast
    ttft_s = forecast.ttft_s if record.rejection is None else record.rejection.predicted_ttft_s
    return {"ttft_ms": ms(ttft_s), "tpot_ms": ms(forecast.tpot_s)}


def _seen(record: RequestEntry) -> dict[str, float | None]:
    """Return measured latencies; `e2e_ms` only for completed requests."""
    seen = record.seen
    if seen is None:
        return {"ttft_ms": None, "tpot_ms": None, "e2e_ms": None}
    ended = record.finish in COMPLETE and not (record.live and record.outcome is None)
    return {"ttft_ms": ms(seen.ttft_s), "tpot_ms": ms(seen.tpot_s), "e2e_ms": ms(seen.e2e_s) if ended else None}


def _refused(rejection: Rejection) -> dict[str, Any]:
    return {
        "objective": rejection.reason,
        "cause": rejection.cause,
        "predicted_ttft_ms": ms(rejection.predicted_ttft_s),
        "attainable_ms": ms(rejection.attainable_s),
        "hopeless": rejection.hopeless,
    }


def objectives_json(slo: Slo) -> dict[str, float | None]:
    """Return objectives in ms; null = none."""
    return {"ttft_ms": ms(slo.ttft_s), "tpot_ms": ms(slo.tpot_s), "e2e_ms": ms(slo.e2e_s)}
