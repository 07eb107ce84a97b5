"""Why a request was late, refused or kept: of a record one name, and one sentence for people."""

from typing import NamedTuple

from roseinfer.core.slo import Cause, Rejection, Slo, Why
from roseinfer.server.observe.losses import PREEMPTED, SAT_OUT, losses, waits_before_seat
from roseinfer.server.observe.records import RequestRecord
from roseinfer.server.request.job import OBJECTIVES, Measured, Outcome

# Names beside those of causes and other losses.
SLOW_STEPS, CLIENT = "slow_steps", "client"
# "It waited 12 ms ..."
_WAITED = {
    Cause.IDLE: "although nothing stood against it",
    Cause.PRICE: "as more was asked than could be done, and it was more work than what was served",
    Cause.PACE: "as the short steps that it needs would have cost too many others their place",
    Cause.QUEUE: "behind other prompts",
    Cause.UTILISATION: "as it and those that ran would not have had their tokens in time",
    Cause.BLOCKS: "for room in the KV cache",
    Cause.LOAD: "for the beginning of its prompt to come from host memory",
    Cause.SEATS: "for a seat (--max-num-seqs)",
    Cause.STEP: "for the end of a step that was running",
    Cause.BUDGET: "for room among the prompt tokens of a step (--max-num-batched-tokens)",
    Cause.TENANT: "as its tenant had more than its share",
    Cause.PARENT: "for the first choice, which computed the prompt for all",
    Cause.GRAMMAR: "for its grammar, which was being compiled",
    Cause.ENGINE: "on the way from another engine, or there",
    Cause.TRANSIT: "on its way to the engine (to be read, tokenised and sent)",
    Cause.OTHER: "for what the scheduling policy does not tell",
}
# "... as ..."
_REFUSED = {
    Cause.IDLE: "even an idle server is too slow for that",
    Cause.PRICE: "more was asked than could be done, and it was more work than what was served",
    Cause.PACE: "the short steps that it needs would have cost too many others their place",
    Cause.QUEUE: "the prompts before it came first",
    Cause.UTILISATION: "it and those that ran would not have had their tokens in time",
    Cause.BLOCKS: "there was no room in the KV cache",
    Cause.LOAD: "the beginning of its prompt was on its way from host memory",
    Cause.SEATS: "no seat was free (--max-num-seqs)",
    Cause.STEP: "a step was running",
    Cause.BUDGET: "a step computes only so many prompt tokens (--max-num-batched-tokens)",
    Cause.TENANT: "its tenant had more than its share",
    Cause.PARENT: "its first choice had not computed the prompt",
    Cause.GRAMMAR: "its grammar was still being compiled",
    Cause.ENGINE: "the engine that it had been in is gone",
    Cause.TRANSIT: "it was on its way for too long",
    Cause.OTHER: "there was too much load",
}
_UNTIL = {"ttft": "until its first token", "tpot": "a token"}
_NAMES = dict(zip(OBJECTIVES, ("first token", "time per token", "whole answer"), strict=True))
_MISSED = {Outcome.MISSED_TTFT: "ttft", Outcome.MISSED_TPOT: "tpot", Outcome.MISSED_E2E: "e2e"}
_GONE = frozenset({"EngineDeadError", "EngineLostError", "EngineUnavailableError"})


class Verdict(NamedTuple):
    """`name`: a `Cause`, "preempted", "sat_out" (steps ran without it), "slow_steps" (it ran all the time), "client"
    (it left), or None: there is nothing to explain, or nobody knows. `summary`: a sentence in English.
    """

    name: str | None
    summary: str


# By the code of the error.
_TURNED_AWAY = {
    "too_many_inflight": Verdict(
        Cause.QUEUE, "Refused: as many requests were in the engine as it takes (--max-inflight-requests)."
    ),
    "queue_full": Verdict(
        Cause.QUEUE, "Refused: as many prompts were in the server as it takes (--max-num-queued-reqs)."
    ),
    "too_many_bodies": Verdict(Cause.QUEUE, "Refused: too many request bodies were on their way (--max-body-readers)."),
    "draining": Verdict(None, "Refused: the server was shutting down."),
    "engine_unhealthy": Verdict(Cause.ENGINE, "Refused: no engine took requests."),
}


def verdict(record: RequestRecord) -> Verdict:
    if record.live and record.outcome is None:
        return _of_live(record)
    if record.rejection is not None:
        return _of_rejection(record, record.rejection)
    objective = None if record.outcome is None else _MISSED.get(record.outcome)
    if objective is not None and record.slo is not None and record.seen is not None:
        return _of_late(record, objective, record.slo, record.seen)
    if record.outcome is Outcome.MET:
        return Verdict(None, _kept(record))
    if record.outcome is Outcome.TIMEOUT:
        return _of_timeout(record)
    if record.reason == "shutdown":
        return Verdict(None, f"The server was shut down {_ms(record.age_s)} after its arrival.")
    if record.outcome is Outcome.ABORTED:
        return Verdict(CLIENT, f"The client left {_ms(record.age_s)} after it had asked.")
    return _of_failure(record)


def _of_live(record: RequestRecord) -> Verdict:
    told = record.told
    if told.first_s is None:
        return Verdict(None, f"It has no token yet, after {_ms(record.age_s)}.")
    return Verdict(None, f"It runs: its first token came after {_ms(told.first_s)}, {told.tokens} so far.")


def _of_rejection(record: RequestRecord, rejection: Rejection) -> Verdict:
    promised = _promised(record.slo, rejection.reason)
    text = f"Refused: {_ms(promised)} for the {_NAMES.get(rejection.reason, rejection.reason)} could not be kept"
    text += f", as {_REFUSED[rejection.cause]}"
    # What was expected may be in time, and not leave the policy its margin.
    if rejection.reason == "ttft" and (promised or 0.0) < rejection.predicted_ttft_s < float("inf"):
        text += f"; it would have come after {_ms(rejection.predicted_ttft_s)}"
    if rejection.attainable_s is not None:
        text += f". {_ms(rejection.attainable_s)} could have been kept"
    return Verdict(rejection.cause, text + ".")


def _of_late(record: RequestRecord, objective: str, slo: Slo, seen: Measured) -> Verdict:
    lost = losses(record)
    at = OBJECTIVES.index(objective)
    late_s = seen[at] - (_promised(slo, objective) or 0.0)
    ran_s = lost.prefill
    if objective == "ttft":
        found = lost.before_first()
    elif objective == "tpot":
        found, ran_s = lost.behind_first(), lost.decode
        late_s *= max(1, record.told.tokens - 1)
    else:
        found, ran_s = lost.all(), lost.prefill + lost.decode
    name = _blamed(found, late_s, ran_s * (1 - lost.idle))
    if name == SLOW_STEPS and objective != "ttft" and record.way is not None and record.way.resumes:
        name = Cause.ENGINE
    text = f"Late: {_seen(objective, seen[at])}, and {_ms(_promised(slo, objective))} was promised"
    return Verdict(name, f"{text}. {_because(record, name, found.get(name, ran_s), objective)}")


def _blamed(found: dict[str, float], late_s: float, ran_s: float) -> str:
    """The largest loss without which, with all others if need be, it would have been in time; failing that, whatever
    took longest.
    """
    name = max(found, key=lambda each: found[each], default=SLOW_STEPS)
    largest = found.get(name, 0.0)
    if largest > 0 and (sum(found.values()) >= late_s or largest >= ran_s):
        return str(name)
    return SLOW_STEPS


def _because(record: RequestRecord, name: str, seconds: float, objective: str) -> str:
    told, why = record.told, record.told.why
    if name == PREEMPTED:
        return f"It lost its place to others {_times(told.preemptions)}, and was without one for {_ms(seconds)}."
    if name == SAT_OUT and why is not None:
        return f"{why.sat_out} of {why.steps} steps went by without it."
    if name == Cause.ENGINE and record.way is not None and record.way.resumes:  # nobody says for how long
        return f"It lost its engine {_times(record.way.resumes)} after its first token, and went on in another."
    if name != SLOW_STEPS:
        return f"It waited {_ms(seconds)} {_WAITED[Cause(name)]}."
    forecast = None if why is None else why.forecast
    if objective == "ttft":
        expected = None if forecast is None else forecast.ttft_s
        chunks = "" if why is None or why.chunks < 2 else f" in {why.chunks} parts"
        computed = f"{record.prompt_tokens - record.cached_tokens} tokens of its prompt"
        text = f"Computing {computed}{chunks} took {_ms(seconds)}"
    else:
        expected = None if forecast is None else forecast.tpot_s if objective == "tpot" else None
        text = _ran(why) + (f", {_ms(told.tpot_s)} a token" if told.tokens > 1 else "")
    return f"{text}." if expected is None else f"{text}; {_ms(expected)} {_UNTIL[objective]} was expected."


def _ran(why: Why | None) -> str:
    """Steps may take long for whatever reason: that it was in each does not say that its tokens came evenly."""
    if why is None or not why.steps:
        return "It ran"
    which = f"{why.steps - why.sat_out} of" if why.sat_out else "all"
    return f"It ran in {which} {why.steps} steps"


def _kept(record: RequestRecord) -> str:
    told = record.told
    if record.seen is None or told.first_s is None:
        return "It finished."
    slo, seen = record.slo, record.seen
    parts = [_seen("ttft", seen.ttft_s) + _of(slo, "ttft")]
    if told.tokens > 1:
        parts.append(f"then {_ms(seen.tpot_s)} a token" + _of(slo, "tpot"))
    if slo is not None and slo.e2e_s is not None:
        parts.append(_seen("e2e", seen.e2e_s) + _of(slo, "e2e"))
    text = ("Nothing was promised: " if slo is None or slo.empty else "Kept: ") + ", ".join(parts)
    waits = waits_before_seat(record)[1]
    cause, seconds = max(waits, key=lambda wait: wait[1], default=(None, 0.0))
    if cause is not None and seconds * 2 > seen.ttft_s:
        text += f". It waited {_ms(seconds)} {_WAITED[cause]}"
    return text + "."


def _of_timeout(record: RequestRecord) -> Verdict:
    lost = losses(record)
    found = lost.before_first() if record.told.first_s is None else lost.all()
    ran_s = (lost.prefill + lost.decode) * (1 - lost.idle)
    where = "before its first token" if record.told.first_s is None else f"after {record.told.tokens} tokens"
    text = f"Its time limit was over after {_ms(record.age_s)}, {where}"
    name = max(found, key=lambda each: found[each], default=SLOW_STEPS)
    if found.get(name, 0.0) <= ran_s or name == Cause.OTHER:
        name = Cause.OTHER if record.told.why is None else SLOW_STEPS
        return Verdict(name, text + ".")
    return Verdict(str(name), f"{text}. {_because(record, name, found[name], 'e2e')}")


def _of_failure(record: RequestRecord) -> Verdict:
    if record.outcome is Outcome.REJECTED:
        return _TURNED_AWAY.get(record.reason, Verdict(None, "Refused: it could not be taken."))
    if record.outcome is None:
        return Verdict(None, "Refused: the request asked for what cannot be done.")
    if record.reason.partition(":")[0] in _GONE:
        return Verdict(Cause.ENGINE, f"It failed after {_ms(record.age_s)}: the engine that it was in is gone.")
    return Verdict(None, f"It failed after {_ms(record.age_s)} and {record.output_tokens} tokens.")


# --- words --------------------------------------------------------------------------------------------------------
def _seen(objective: str, seconds: float) -> str:
    if objective == "tpot":
        return f"it took {_ms(seconds)} a token"
    return f"the {'first' if objective == 'ttft' else 'last'} token came after {_ms(seconds)}"


def _of(slo: Slo | None, objective: str) -> str:
    promised = _promised(slo, objective)
    return "" if promised is None else f" of {_ms(promised)}"


def _promised(slo: Slo | None, objective: str) -> float | None:
    if slo is None:
        return None
    return {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}.get(objective)


def _ms(seconds: float | None) -> str:
    """Three digits, or all of the whole milliseconds; from 10 s on in seconds."""
    if seconds is None:
        return "nothing"
    ms = seconds * 1000
    if ms >= 10_000:
        return f"{seconds:.1f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
