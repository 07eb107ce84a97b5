"""Explanation of a request's latency or rejection: a name for programs and a sentence for people."""

from typing import NamedTuple

from roseinfer.core.slo import Cause, Rejection, Slo
from roseinfer.server.observe.delays import (
    PREEMPTED,
    SAT_OUT,
    PhaseTimes,
    after_first,
    before_first,
    waits_before_seat,
)
from roseinfer.server.observe.records import RequestEntry, SampleSummary
from roseinfer.server.request.job import OBJECTIVES, Latencies, Outcome

# Verdicts that are neither a `Cause` nor a delay of `delays`.
SLOW_STEPS, CLIENT = "slow_steps", "client"
# Noun phrases after "because of", for waits and rejections.
_BECAUSE_OF = {
    Cause.IDLE: "the speed of the machine, even without other load",
    Cause.PRICE: "overload: it was more work than the requests that were served",
    Cause.PACE: "overload: the short steps that its pace needs would have displaced too many other requests",
    Cause.QUEUE: "the prompts ahead of it",
    Cause.UTILISATION: "the token deadlines of running requests",
    Cause.BLOCKS: "a shortage of KV cache blocks",
    Cause.LOAD: "the load of its prefix from host memory",
    Cause.SEATS: "the limit on running sequences (--max-num-seqs)",
    Cause.SLOTS: "a shortage of slots for recurrent states",
    Cause.ADAPTER: "its LoRA adapter, which was not in a slot",
    Cause.STEP: "the step that was running",
    Cause.BUDGET: "the limit on prompt tokens per step (--max-num-batched-tokens)",
    Cause.TENANT: "its tenant's share of the machine",
    Cause.PARENT: "its first choice, which computed the shared prompt",
    Cause.GRAMMAR: "the compilation of its grammar",
    Cause.ENGINE: "its time on or transfer from another engine",
    Cause.TRANSIT: "its transit to the engine (reading, tokenising, sending)",
    Cause.OTHER: "load; the scheduling policy does not report the cause",
}
_UNIT = {"ttft": "to the first token", "tpot": "per token"}
_NAMES = dict(zip(OBJECTIVES, ("first token", "time per token", "whole answer"), strict=True))
_MISSED = {Outcome.MISSED_TTFT: "ttft", Outcome.MISSED_TPOT: "tpot", Outcome.MISSED_E2E: "e2e"}
_GONE = frozenset({"EngineDeadError", "EngineLostError", "EngineUnavailableError"})


class Explanation(NamedTuple):
    """Explanation of one request. `summary`: a sentence in English.

    `name`: a `Cause`, "preempted", "sat_out" (steps ran without it), "slow_steps" (it ran all the time), "client" (the
    client left), or None if there is nothing to explain or the cause is unknown.
    """

    name: str | None
    summary: str


# Requests rejected before they were read, by error code.
_REJECTED_UNREAD = {
    "too_many_inflight": Explanation(
        Cause.QUEUE, "Rejected: the engine was at its limit of requests (--max-inflight-requests)."
    ),
    "queue_full": Explanation(Cause.QUEUE, "Rejected: the server was at its limit of prompts (--max-num-queued-reqs)."),
    "too_many_bodies": Explanation(Cause.QUEUE, "Rejected: too many bodies were being read (--max-body-readers)."),
    "draining": Explanation(None, "Rejected: the server was shutting down."),
    "engine_unhealthy": Explanation(Cause.ENGINE, "Rejected: no engine accepted requests."),
}


def verdict(record: RequestEntry) -> Explanation:
    """Explain what became of a request."""
    if record.live and record.outcome is None:
        return _of_live(record)
    if record.rejection is not None:
        return _of_rejection(record, record.rejection)
    objective = None if record.outcome is None else _MISSED.get(record.outcome)
    if objective is not None and record.slo is not None and record.seen is not None:
        return _of_late(record, objective, record.slo, record.seen)
    if record.outcome is Outcome.MET:
        return Explanation(None, _kept(record))
    if record.outcome is Outcome.TIMEOUT:
        return _of_timeout(record)
    if record.reason == "shutdown":
        return Explanation(None, f"The server shut down {_ms(record.age_s)} after its arrival.")
    if record.outcome is Outcome.ABORTED:
        return Explanation(CLIENT, f"The client disconnected after {_ms(record.age_s)}.")
    return _of_failure(record)


def _of_live(record: RequestEntry) -> Explanation:
    sample = record.worst
    if sample.first_s is None:
        return Explanation(None, f"Waiting for its first token since {_ms(record.age_s)}.")
    return Explanation(None, f"Running: first token after {_ms(sample.first_s)}; {sample.tokens} tokens so far.")


def _of_rejection(record: RequestEntry, rejection: Rejection) -> Explanation:
    target = _objective(record.slo, rejection.reason)
    text = f"Rejected: {_ms(target)} for the {_NAMES.get(rejection.reason, rejection.reason)} was out of reach"
    text += f" because of {_BECAUSE_OF[rejection.cause]}"
    # A forecast within the objective may still be rejected: the policy keeps a margin.
    if rejection.attainable_s is not None:
        text += f". {_ms(rejection.attainable_s)} was attainable"
    elif rejection.reason == "ttft" and (target or 0.0) < rejection.predicted_ttft_s < float("inf"):
        text += f"; it was expected after {_ms(rejection.predicted_ttft_s)}"
    return Explanation(rejection.cause, text + ".")


def _of_late(record: RequestEntry, objective: str, slo: Slo, seen: Latencies) -> Explanation:
    at = OBJECTIVES.index(objective)
    late_s = seen[at] - (_objective(slo, objective) or 0.0)
    times, sample = _times_of(record, objective), record.worst
    if objective == "tpot":
        late_s *= max(1, sample.tokens - 1)
    name = _blamed(times.delays(), late_s, times.ran)
    if name == SLOW_STEPS and objective != "ttft" and record.route is not None and record.route.resumes:
        name = Cause.ENGINE
    text = f"Late: {_seen(sample, objective, seen[at])}; the objective was {_ms(_objective(slo, objective))}"
    return Explanation(name, f"{text}. {_because(record, name, times, objective)}")


def _times_of(record: RequestEntry, objective: str) -> PhaseTimes:
    """Return the times that an objective counts."""
    if objective == "ttft":
        return before_first(record)
    return after_first(record) if objective == "tpot" else before_first(record).plus(after_first(record))


def _blamed(found: dict[str, float], late_s: float, ran_s: float) -> str:
    """Return the largest delay if all delays together explain the lateness, or if it exceeds the running time."""
    name = max(found, key=lambda each: found[each], default=SLOW_STEPS)
    largest = found.get(name, 0.0)
    if largest > 0 and (sum(found.values()) >= late_s or largest >= ran_s):
        return str(name)
    return SLOW_STEPS


def _because(record: RequestEntry, name: str, times: PhaseTimes, objective: str) -> str:
    sample, why = record.worst, record.worst.first_why
    seconds = times.delays().get(name, times.ran)
    if name == PREEMPTED:
        often = "before its first token" if objective == "ttft" else _times(sample.preemptions)
        return f"It was preempted {often} and had no seat for {_ms(seconds)}."
    if name == SAT_OUT:
        return f"{times.missed} of {times.steps} steps{_WHEN[objective]} ran without it."
    if name == Cause.ENGINE and record.route is not None and record.route.resumes:  # for an unknown time
        return f"Its engine failed {_times(record.route.resumes)} after its first token; it resumed on another engine."
    if name != SLOW_STEPS:
        return f"It waited {_ms(seconds)} because of {_BECAUSE_OF[Cause(name)]}."
    forecast = None if why is None else why.forecast
    if objective == "ttft":
        expected = None if forecast is None else forecast.ttft_s
        chunks = "" if why is None or why.chunks < 2 else f" in {why.chunks} chunks"
        computed = f"{record.prompt_tokens - record.cached_tokens} prompt tokens"
        text = f"Computing {computed}{chunks} took {_ms(seconds)}"
    else:
        expected = None if forecast is None else forecast.tpot_s if objective == "tpot" else None
        text = _ran(times, objective) + (f", {_ms(sample.tpot_s)} per token" if sample.tokens > 1 else "")
    return f"{text}." if expected is None else f"{text}; {_ms(expected)} {_UNIT[objective]} was expected."


_WHEN = {"ttft": " before its first token", "tpot": " after its first token", "e2e": ""}


def _ran(times: PhaseTimes, objective: str) -> str:
    if not times.steps:
        return "It ran"
    which = f"{times.steps - times.missed} of" if times.missed else "all"
    return f"It ran in {which} {times.steps} steps{_WHEN[objective]}"


def _kept(record: RequestEntry) -> str:
    sample = record.worst
    if record.seen is None or sample.first_s is None:
        return "It finished."
    slo, seen = record.slo, record.seen
    parts = [_seen(sample, "ttft", seen.ttft_s) + _of(slo, "ttft")]
    if sample.tokens > 1:
        parts.append(f"then {_ms(seen.tpot_s)} per token" + _of(slo, "tpot"))
    if slo is not None and slo.e2e_s is not None:
        parts.append(_seen(sample, "e2e", seen.e2e_s) + _of(slo, "e2e"))
    text = ("No objectives: " if slo is None or slo.empty else "In time: ") + ", ".join(parts)
    waits = waits_before_seat(record)[1]
    cause, seconds = max(waits, key=lambda wait: wait[1], default=(None, 0.0))
    if cause is not None and seconds * 2 > seen.ttft_s:
        text += f". It waited {_ms(seconds)} because of {_BECAUSE_OF[cause]}"
    return text + "."


def _of_timeout(record: RequestEntry) -> Explanation:
    times = _times_of(record, "e2e")
    found = times.delays()
    where = "before its first token" if record.worst.first_s is None else f"after {record.worst.tokens} tokens"
    text = f"It timed out after {_ms(record.age_s)}, {where}"
    name = max(found, key=lambda each: found[each], default=SLOW_STEPS)
    if found.get(name, 0.0) <= times.ran or name == Cause.OTHER:
        name = Cause.OTHER if record.worst.why is None else SLOW_STEPS
        return Explanation(name, text + ".")
    return Explanation(str(name), f"{text}. {_because(record, name, times, 'e2e')}")


def _of_failure(record: RequestEntry) -> Explanation:
    if record.outcome is Outcome.REJECTED:
        return _REJECTED_UNREAD.get(record.reason, Explanation(None, "Rejected: the server could not take it."))
    if record.outcome is None:
        return Explanation(None, "Invalid: the request was not accepted.")
    if record.reason.partition(":")[0] in _GONE:
        return Explanation(Cause.ENGINE, f"It failed after {_ms(record.age_s)}: its engine is gone.")
    return Explanation(None, f"It failed after {_ms(record.age_s)} and {record.output_tokens} tokens.")


# --- words --------------------------------------------------------------------------------------------------------
def _seen(sample: SampleSummary, objective: str, seconds: float) -> str:
    if objective == "tpot":
        return f"each token took {_ms(seconds)}"
    what = "result" if not sample.tokens else "first token" if objective == "ttft" else "last token"
    return f"the {what} came after {_ms(seconds)}"


def _of(slo: Slo | None, objective: str) -> str:
    target = _objective(slo, objective)
    return "" if target is None else f" of {_ms(target)}"


def _objective(slo: Slo | None, objective: str) -> float | None:
    if slo is None:
        return None
    return {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}.get(objective)


def _ms(seconds: float | None) -> str:
    """Format milliseconds with three digits, or whole ones; seconds from 10 s on."""
    if seconds is None:
        return "nothing"
    ms = seconds * 1000
    if ms >= 10_000:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
