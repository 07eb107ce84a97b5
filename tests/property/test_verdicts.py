"""Verdicts on late requests follow from their timelines: random loads, against a reference from plans and events."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.core.outputs import COMPLETE
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.sched.policies.common.planned import PlannedDecision
from roseinfer.sched.policy import Decision, Event, View
from roseinfer.server.observe.delays import PREEMPTED, SAT_OUT, PhaseTimes, after_first, before_first
from roseinfer.server.observe.records import RequestEntry, SampleSummary
from roseinfer.server.observe.verdict import SLOW_STEPS, verdict
from roseinfer.server.request.job import Latencies, Outcome
from tests.helpers.engines import add, make_core
from tests.helpers.timelines import Phase, Recorder, Timeline

MISSED = {"ttft": Outcome.MISSED_TTFT, "tpot": Outcome.MISSED_TPOT, "e2e": Outcome.MISSED_E2E}


class RandomPolicy:
    """Lets any requests run, start, and lose their blocks."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def begin(self, view: View) -> Decision:
        rng, waiting = self._rng, list(view.waiting())
        share = rng.choice([0.3, 0.7, 1.0])
        running = [request for request in view.running if rng.random() < share]
        starts = [request for request in waiting if rng.random() < 0.5]
        chunks = {request.request_id: rng.choice([1, 3, 100]) for request in [*view.running, *starts]}
        yields = [request for request in view.running if rng.random() < 0.02]
        return PlannedDecision(running, chunks, starts, yields=yields)

    def observe(self, event: Event) -> None:
        pass


def load(rng: random.Random, depth: int, policy: str | None) -> tuple[EngineCore, Recorder]:
    options = {} if policy is None else {"scheduling_policy": policy, "max_batch_size": rng.choice([None, 1, 2])}
    core = make_core(
        depth=depth, num_blocks=rng.choice([12, 64]), max_num_batched_tokens=rng.choice([6, 32]), **options
    )
    if policy is None:
        core.scheduler.policy = RandomPolicy(rng)
    recorder = Recorder(core)
    for number in range(rng.randrange(2, 9)):
        prompt, output = rng.randrange(1, 20), rng.randrange(1, 20)
        add(
            core, str(number), [rng.randrange(4, 50) for _ in range(prompt)], max_tokens=output, n=rng.choice([1, 1, 2])
        )
        for _ in range(rng.randrange(3)):
            turn(core, rng)
    while core.busy:
        turn(core, rng)
    return core, recorder


def turn(core: EngineCore, rng: random.Random) -> None:
    core.launch()
    core.clock.advance(rng.choice([0.02, 0.1, 1.0]) * rng.uniform(0.8, 1.2))
    core.settle()


def entry(timeline: Timeline, objective: str, share: float) -> RequestEntry:
    """Return the server's record of a sequence that was late: `share` of what it took was the objective."""
    assert timeline.started is not None and timeline.end is not None
    first_s, last_s = (timeline.tokens[at][1] - timeline.arrival_s for at in (0, -1))
    tokens, end = len(timeline.tokens), timeline.end
    seen = Latencies(first_s, (last_s - first_s) / max(1, tokens - 1), last_s)
    objectives = [value * share if objective == name else None for name, value in zip(MISSED, seen, strict=True)]
    scheduled_s = end.times.scheduled_s - timeline.arrival_s
    sample = SampleSummary(
        scheduled_s, first_s, last_s, seen.tpot_s, tokens, end.preemptions, end.why, end.reason, timeline.started.why
    )
    return RequestEntry(
        number=1, live=False, id="x", request_id="x", api="chat", model="m", stream=True, created_s=0.0, age_s=last_s,
        slo=Slo(*objectives), outcome=MISSED[objective], finish=end.reason, reason="", status=200, prompt_tokens=9,
        cached_tokens=0, output_tokens=tokens, choices=1, seen=seen, worst=sample, route=None, rejection=None,
    )  # fmt: skip


def check_phase(found: PhaseTimes, exact: Phase) -> None:
    assert sum(found.waits.values()) + found.preempted == pytest.approx(exact.waited, abs=1e-6)
    assert (found.steps, found.missed) == (exact.steps, exact.missed)
    assert found.sat_out + found.ran == pytest.approx(exact.sat_out + exact.ran, abs=1e-6)


def delays_of(timeline: Timeline, before: Phase, after: Phase) -> dict[str, tuple[dict[str, float], float]]:
    """Return the delays by name, and the rest of the time, that each objective counts."""
    assert timeline.started is not None and timeline.started.why is not None
    first = {str(cause): seconds for cause, seconds in timeline.started.why.waited}
    first |= {PREEMPTED: 0.0, SAT_OUT: before.sat_out if before.missed else 0.0}
    had_seat_s = after.sat_out + after.ran
    later = {PREEMPTED: after.waited, SAT_OUT: had_seat_s * after.missed / after.steps if after.steps else 0.0}
    both = {name: first.get(name, 0.0) + later.get(name, 0.0) for name in first | later}
    ran_s = before.sat_out + before.ran - first[SAT_OUT], had_seat_s - later[SAT_OUT]
    return {"ttft": (first, ran_s[0]), "tpot": (later, ran_s[1]), "e2e": (both, sum(ran_s))}


def expected(delays: dict[str, float], ran_s: float, share: float) -> set[str]:
    """Return the names that the rule of docs/how-to/why.md allows; several if times are equal but for rounding."""
    late_s = (sum(delays.values()) + ran_s) * (1 - share)
    longest, close = max(delays.values()), 1e-6
    names = {name for name, seconds in delays.items() if seconds > longest - close}
    surely = longest > close and (sum(delays.values()) > late_s + close or longest > ran_s + close)
    maybe = longest > -close and (sum(delays.values()) > late_s - close or longest > ran_s - close)
    return names if surely else names | {SLOW_STEPS} if maybe else {SLOW_STEPS}


def check_words(text: str, objective: str, exact: Phase) -> None:
    """Check that counts and times in a summary are those of the phase that the objective counts."""
    of_steps = re.search(r"(\d+) of (\d+) steps", text)
    if of_steps:
        count = exact.missed if "ran without it" in text else exact.steps - exact.missed
        assert [int(group) for group in of_steps.groups()] == [count, exact.steps], text
        where = {"ttft": "before its first token", "tpot": "after its first token", "e2e": "steps"}[objective]
        assert where in text
    waited = re.search(r"(?:It waited|had no seat for) ([\d.]+) (ms|s)", text)
    if waited:
        seconds = float(waited[1]) / {"ms": 1000, "s": 1}[waited[2]]
        assert seconds <= exact.waited * 1.01 + 0.06, text


@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    policy=st.sampled_from([None, None, "fifo", "slack"]),
    share=st.floats(0.05, 0.98),
)
@settings(max_examples=60)
def test_verdicts_follow_from_timelines(seed: int, depth: int, policy: str | None, share: float) -> None:
    _, recorder = load(random.Random(seed), depth, policy)
    for name, timeline in recorder.found.items():
        if timeline.end is None or timeline.end.reason not in COMPLETE:
            continue
        (first_step, first_at_s), (last_step, last_at_s) = timeline.tokens[0], timeline.tokens[-1]
        before = recorder.phase(name, (timeline.arrival_s, first_at_s), (0, first_step + 1))
        after = recorder.phase(name, (first_at_s, last_at_s), (first_step + 1, last_step + 1))
        record = entry(timeline, "ttft", share)
        check_phase(before_first(record), before)
        check_phase(after_first(record), after)
        assert before_first(record).sat_out == pytest.approx(before.sat_out if before.missed else 0.0, abs=1e-6)
        delays = delays_of(timeline, before, after)
        preempted_early = timeline.seats[0][1] < first_at_s
        for objective, exact in (("ttft", before), ("tpot", after), ("e2e", _sum(before, after))):
            if objective == "tpot" and len(timeline.tokens) < 2:
                continue
            found = verdict(entry(timeline, objective, share))
            if objective == "tpot" or not preempted_early:  # which of its waits came later is not reported
                assert found.name in expected(*delays[objective], share), (found, delays[objective])
            check_words(found.summary.partition(". ")[2], objective, exact)


def _sum(a: Phase, b: Phase) -> Phase:
    return Phase(*(x + y for x, y in zip(a, b, strict=True)))
