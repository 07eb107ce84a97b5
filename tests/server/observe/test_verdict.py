"""Verdicts and timelines of request records."""

from itertools import pairwise
from typing import Any

import orjson
import pytest

from roseinfer.core.slo import Cause, Forecast, Rejection, Slo, Why
from roseinfer.engine.api import Route
from roseinfer.server.formats.request_document import RequestState
from roseinfer.server.observe.record_json import record_json, timeline
from roseinfer.server.observe.records import RequestEntry, SampleSummary
from roseinfer.server.observe.verdict import verdict
from roseinfer.server.request.job import Latencies, Outcome

SLO = Slo(0.5, 0.05, 2.0, "chat")


def sample_of(
    seat_s: float | None, first_s: float | None, last_s: float | None, tokens: int = 11, **more: Any
) -> SampleSummary:
    tpot_s = (last_s - first_s) / (tokens - 1) if first_s is not None and last_s is not None and tokens > 1 else 0.0
    first_why = more.pop("first", more.get("why"))
    return SampleSummary(seat_s, first_s, last_s, tpot_s, tokens, **{"finish": "stop", "first_why": first_why} | more)


def record(sample: SampleSummary, outcome: Outcome | None, slo: Slo | None = SLO, **more: Any) -> RequestEntry:
    seen = None
    if sample.first_s is not None and sample.last_s is not None:
        seen = Latencies(sample.first_s, sample.tpot_s, sample.last_s)
    fields: dict[str, Any] = {
        "number": 1,
        "live": False,
        "id": "chatcmpl-x",
        "request_id": "x",
        "api": "chat",
        "model": "m",
        "stream": True,
        "created_s": 1e9,
        "age_s": sample.last_s or 1.0,
        "slo": slo,
        "outcome": outcome,
        "finish": sample.finish,
        "reason": "",
        "status": 200,
        "prompt_tokens": 100,
        "cached_tokens": 20,
        "output_tokens": sample.tokens,
        "choices": 1,
        "seen": seen,
        "worst": sample,
        "route": None,
        "rejection": None,
    }
    return RequestEntry(**fields | more)


def waited(*waits: tuple[Cause, float], steps: int = 20, sat_out: int = 0, **more: Any) -> Why:
    return Why(waits, steps=steps, sat_out=sat_out, **more)


def late_start(why: Why | None = None) -> SampleSummary:
    return sample_of(0.6, 0.7, 1.0, why=why)


AT_ONCE = Why(steps=1)  # at a first token that did not wait
LATE_START = late_start()
WAITS = [cause for cause in Cause if cause is not Cause.IDLE]


@pytest.mark.parametrize("cause", WAITS)
def test_a_late_start_names_the_cause_of_the_wait(cause: Cause) -> None:
    sample = late_start(waited((cause, 0.6)))
    found = verdict(record(sample, Outcome.MISSED_TTFT))
    assert found.name == cause
    assert "came after 700 ms; the objective was 500 ms" in found.summary and "waited 600 ms" in found.summary
    others = {verdict(record(late_start(waited((each, 0.6))), Outcome.MISSED_TTFT)) for each in WAITS}
    assert len(others) == len(WAITS), "each cause has its own phrase"


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("attainable_s", [None, 0.9])
def test_a_rejection_names_its_cause(cause: Cause, attainable_s: float | None) -> None:
    rejection = Rejection("ttft", 0.812, cause, attainable_s)
    sample = sample_of(None, None, None, 0, finish="rejected")
    found = verdict(record(sample, Outcome.REJECTED, rejection=rejection, status=429))
    assert found.name == cause
    assert "500 ms for the first token" in found.summary
    # One number: what could have been promised if it is known, else what was expected.
    assert ("900 ms was attainable" in found.summary) == (attainable_s is not None)
    assert ("812 ms" in found.summary) == (attainable_s is None)


def test_a_rejection_does_not_name_a_forecast_within_the_objective() -> None:
    sample = sample_of(None, None, None, 0, finish="rejected")
    made = record(sample, Outcome.REJECTED, rejection=Rejection("ttft", 0.49, Cause.TRANSIT, 0.6))
    assert "490 ms" not in verdict(made).summary and "600 ms was attainable" in verdict(made).summary


@pytest.mark.parametrize("outcome", [Outcome.MISSED_TPOT, Outcome.MISSED_E2E])
def test_a_resumed_request_blames_the_engine_failure(outcome: Outcome) -> None:
    sample = sample_of(0.0, 0.1, 2.5, why=waited((Cause.ENGINE, 1.4)))
    found = verdict(record(sample, outcome, route=Route(1, "rest", 0, 0, 1)))
    assert found.name == "engine" and "Its engine failed once after its first token" in found.summary


def test_a_rejection_for_another_objective_does_not_name_the_first_token() -> None:
    sample = sample_of(None, None, None, 0, finish="rejected")
    tpot = verdict(record(sample, Outcome.REJECTED, rejection=Rejection("tpot", 0.1, Cause.UTILISATION)))
    assert "50 ms for the time per token" in tpot.summary and "100 ms" not in tpot.summary
    e2e = verdict(record(sample, Outcome.REJECTED, rejection=Rejection("e2e", float("inf"), Cause.IDLE)))
    assert "2000 ms for the whole answer" in e2e.summary and "inf" not in e2e.summary


@pytest.mark.parametrize(
    ("sample", "outcome", "name", "words"),
    [
        # The longest of several waits that together explain the lateness.
        (
            sample_of(0.6, 0.7, 1.0, why=waited((Cause.SEATS, 0.4), (Cause.STEP, 0.2))),
            Outcome.MISSED_TTFT,
            "seats",
            "400",
        ),
        # No wait but the transit to its engine.
        (
            sample_of(0.01, 0.7, 1.0, why=waited()),
            Outcome.MISSED_TTFT,
            "slow_steps",
            "Computing 80 prompt tokens took 690 ms",
        ),
        (sample_of(0.01, 0.7, 1.0, why=waited(chunks=3)), Outcome.MISSED_TTFT, "slow_steps", "in 3 chunks"),
        (
            sample_of(0.01, 0.7, 1.0, why=waited(forecast=Forecast(0.3))),
            Outcome.MISSED_TTFT,
            "slow_steps",
            "300 ms to the first token was expected",
        ),
        # The engine named no wait, or nothing at all.
        (sample_of(0.6, 0.7, 1.0, why=waited()), Outcome.MISSED_TTFT, "transit", "600 ms"),
        (sample_of(0.6, 0.7, 1.0), Outcome.MISSED_TTFT, "other", "600 ms"),
        # It had a seat, and steps ran without it.
        (
            sample_of(0.0, 0.7, 1.0, why=waited(steps=20, sat_out=8), first=waited(steps=10, sat_out=8, prefill_s=0.2)),
            Outcome.MISSED_TTFT,
            "sat_out",
            "8 of 10 steps before its first token ran without it",
        ),
        (
            sample_of(0.0, 0.1, 1.1, why=waited(steps=11, sat_out=6), first=AT_ONCE),
            Outcome.MISSED_TPOT,
            "sat_out",
            "6 of 10 steps after its first token ran without it",
        ),
        (
            sample_of(0.0, 0.1, 2.5, why=waited(steps=11, sat_out=6), first=AT_ONCE),
            Outcome.MISSED_E2E,
            "sat_out",
            "6 of 11 steps ran without it",
        ),
        # The steps without it came after its first token, which was late for another reason (findings F7).
        (
            sample_of(0.0, 0.7, 1.0, why=waited(steps=114, sat_out=12), first=waited(steps=3, prefill_s=0.7)),
            Outcome.MISSED_TTFT,
            "slow_steps",
            "Computing 80 prompt tokens took 700 ms",
        ),
        # Most steps before its first token ran without it, but its own were long.
        (
            sample_of(0.0, 0.7, 1.0, why=waited(), first=waited(steps=10, sat_out=8, prefill_s=0.65)),
            Outcome.MISSED_TTFT,
            "slow_steps",
            "took 650 ms",
        ),
        (
            sample_of(0.0, 0.1, 1.1, why=waited(), first=AT_ONCE),
            Outcome.MISSED_TPOT,
            "slow_steps",
            "It ran in all 19 steps after its first token, 100 ms per token",
        ),
        (
            sample_of(0.0, 0.1, 1.1, why=waited(sat_out=1), first=AT_ONCE),
            Outcome.MISSED_TPOT,
            "slow_steps",
            "It ran in 18 of 19 steps after its first token, 100",
        ),
        (sample_of(0.0, 0.1, 1.1), Outcome.MISSED_TPOT, "slow_steps", "100 ms per token"),
        (
            sample_of(0.0, 0.1, 1.1, why=waited(forecast=Forecast(0.3, 0.04))),
            Outcome.MISSED_TPOT,
            "slow_steps",
            "40 ms per token was expected",
        ),
        (
            sample_of(0.0, 0.7, 1.0, preemptions=1, why=waited((Cause.BLOCKS, 0.6)), first=waited((Cause.BLOCKS, 0.6))),
            Outcome.MISSED_TTFT,
            "preempted",
            "It was preempted before its first token and had no seat for 600 ms",
        ),
        # Preempted for longer than it is late.
        (
            sample_of(0.0, 0.1, 1.1, preemptions=2, why=waited((Cause.BLOCKS, 0.7)), first=AT_ONCE),
            Outcome.MISSED_TPOT,
            "preempted",
            "preempted twice and had no seat for 700 ms",
        ),
        (sample_of(0.0, 0.1, 1.1, preemptions=1), Outcome.MISSED_TPOT, "preempted", "once"),
        (sample_of(1.5, 1.6, 2.5, why=waited((Cause.TENANT, 1.5))), Outcome.MISSED_E2E, "tenant", "1500 ms"),
        (sample_of(0.0, 0.1, 2.5, why=waited()), Outcome.MISSED_E2E, "slow_steps", "240 ms per token"),
    ],
)
def test_a_late_request_names_its_largest_delay(sample: SampleSummary, outcome: Outcome, name: str, words: str) -> None:
    found = verdict(record(sample, outcome))
    assert found.name == name and words in found.summary, found
    assert found.summary.startswith("Late: ")


def test_a_wait_that_would_not_have_made_the_difference_is_not_blamed() -> None:
    sample = sample_of(0.1, 3.0, 4.0, why=waited((Cause.SEATS, 0.1)))
    assert verdict(record(sample, Outcome.MISSED_TTFT)).name == "slow_steps"


@pytest.mark.parametrize(
    ("made", "name", "words"),
    [
        (
            record(sample_of(0.1, 0.2, 0.5), Outcome.MET),
            None,
            "In time: the first token came after 200 ms of 500 ms, then 30 ms",
        ),
        (record(sample_of(0.1, 0.2, 0.2, 1), Outcome.MET, None), None, "No objectives: the first token came"),
        (record(sample_of(0.1, 0.2, 0.2, 0), Outcome.MET, None), None, "No objectives: the result came after 200 ms."),
        (
            record(sample_of(0.1, 0.7, 0.7, 0), Outcome.MISSED_TTFT),
            "slow_steps",
            "Late: the result came after 700 ms; the objective was 500 ms",
        ),
        (
            record(sample_of(0.1, 0.11, 0.5, why=waited((Cause.STEP, 0.1))), Outcome.MET),
            None,
            "waited 100 ms because of the step",
        ),
        (
            record(sample_of(None, None, None, 0, finish=""), Outcome.ABORTED),
            "client",
            "The client disconnected after 1000 ms",
        ),
        (record(sample_of(0.1, 0.2, 0.5, finish=""), Outcome.ABORTED, reason="shutdown"), None, "shut down"),
        (
            record(
                sample_of(None, None, None, 0, finish="", why=waited((Cause.SEATS, 0.9))), Outcome.TIMEOUT, status=504
            ),
            "seats",
            "before its first token. It waited 900 ms because of the limit on running sequences",
        ),
        (record(sample_of(None, None, None, 0, finish="timeout"), Outcome.TIMEOUT), "other", "before its first token."),
        (
            record(sample_of(0.0, 0.2, 5.0, why=waited(), finish="timeout"), Outcome.TIMEOUT),
            "slow_steps",
            "after 5000 ms, after 11 tokens",
        ),
        (record(sample_of(0.1, 0.2, 0.5, finish=""), Outcome.FAILED, reason="EngineLostError: x"), "engine", "is gone"),
        (
            record(sample_of(0.1, 0.2, 0.5, finish=""), Outcome.FAILED, reason="RuntimeError: x"),
            None,
            "It failed after 500 ms",
        ),
        (
            record(sample_of(None, None, None, 0, finish=""), Outcome.REJECTED, reason="too_many_inflight"),
            "queue",
            "max-inf",
        ),
        (record(sample_of(None, None, None, 0, finish=""), None, reason="invalid", status=400), None, "Invalid: "),
        (
            record(sample_of(None, None, None, 0, finish=""), None, live=True, number=0),
            None,
            "first token since 1000 ms",
        ),
        (
            record(sample_of(None, 0.2, 0.5, 4, finish=""), None, live=True, number=0),
            None,
            "first token after 200 ms; 4 tokens so far",
        ),
    ],
)
def test_every_other_end_has_a_summary(made: RequestEntry, name: str | None, words: str) -> None:
    found = verdict(made)
    assert found.name == name and words in found.summary, found
    assert found.summary.endswith(".")


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("queue_full", "queue"), ("too_many_bodies", "queue"), ("too_many_inflight", "queue"),
        ("engine_unhealthy", "engine"), ("draining", None), ("unheard_of", None),
    ],
)  # fmt: skip
def test_a_request_rejected_unread_names_the_limit(reason: str, name: str | None) -> None:
    found = verdict(record(sample_of(None, None, None, 0, finish=""), Outcome.REJECTED, reason=reason))
    assert found.name == name and found.summary.startswith("Rejected: ") and found.summary.endswith(".")


def test_every_outcome_is_a_record_of_the_documented_shape() -> None:
    for outcome in (*Outcome, None):
        for sample in (LATE_START, sample_of(None, None, None, 0), late_start(waited((Cause.SEATS, 0.6)))):
            for live in (False, True):
                made = record_json(record(sample, outcome, live=live, route=Route(1, "promise", 1, 0, 2)))
                RequestState.model_validate_json(orjson.dumps(made))


# --- timeline --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("made", "phases"),
    [
        (
            record(sample_of(0.3, 0.4, 0.9, why=waited((Cause.SEATS, 0.2), (Cause.STEP, 0.06))), Outcome.MET),
            [("transit", 40), ("step", 60), ("seats", 200), ("prefill", 100), ("decode", 500)],
        ),
        (
            record(sample_of(0.3, 0.4, 0.9, why=waited((Cause.SEATS, 0.2), (Cause.ENGINE, 0.1))), Outcome.MET),
            [("engine", 100), ("seats", 200), ("prefill", 100), ("decode", 500)],
        ),
        # Waits after a preemption are not part of the time before the first seat.
        (
            record(
                sample_of(0.1, 0.2, 1.0, preemptions=1, why=waited((Cause.BLOCKS, 0.6), (Cause.STEP, 0.1))), Outcome.MET
            ),
            [("step", 100), ("prefill", 100), ("decode", 800)],
        ),
        # Waits reported by the engine that resumed it after its first token do not count before it.
        (
            record(
                sample_of(0.1, 0.2, 1.0, why=waited((Cause.ENGINE, 0.6)), first=waited((Cause.STEP, 0.1))),
                Outcome.MET,
                route=Route(1, "promise", 0, 0, 1),
            ),
            [("step", 100), ("prefill", 100), ("decode", 800)],
        ),
        (record(sample_of(0.1, 0.2, 0.2, 1), Outcome.MET), [("wait", 100), ("prefill", 100)]),
        (record(sample_of(None, None, None, 0), Outcome.ABORTED), [("wait", 1000)]),
        # Its end arrived from the engine after its waits.
        (
            record(sample_of(None, None, None, 0, why=waited((Cause.SEATS, 0.6), (Cause.STEP, 0.1))), Outcome.REJECTED),
            [("step", 100), ("seats", 600), ("wait", 300)],
        ),
        (record(sample_of(0.4, None, None, 0), Outcome.ABORTED), [("wait", 400), ("prefill", 600)]),
        # A running request's engine reports its waits, but not when they ended.
        (
            record(
                sample_of(None, 0.3, 0.5, 4, finish="", why=waited((Cause.SEATS, 0.2))),
                None,
                live=True,
                number=0,
                age_s=0.6,
            ),
            [("seats", 200), ("prefill", 100), ("decode", 300)],
        ),
    ],
)
def test_the_timeline_has_no_gaps(made: RequestEntry, phases: list[tuple[str, float]]) -> None:
    found = timeline(made)
    assert [(each["cause"] or each["phase"], round(each["to_ms"] - each["from_ms"])) for each in found] == phases
    assert found[0]["from_ms"] == 0 and all(a["to_ms"] == pytest.approx(b["from_ms"]) for a, b in pairwise(found))


@pytest.mark.parametrize("seat_s", [0.0, 0.25, 5.0])
def test_times_that_contradict_each_other_are_cut(seat_s: float) -> None:
    """Clocks of two machines differ."""
    found = timeline(record(sample_of(seat_s, 0.3, 0.2, why=waited((Cause.SEATS, 9.0))), Outcome.MET))
    assert all(each["to_ms"] >= each["from_ms"] for each in found)
    assert found[-1]["to_ms"] <= 300
