"""Real waits and rows of requests, from the messages to policy and runner, to compare with `Why`."""

import pytest

from roseinfer.core.clock import Clock
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Why
from roseinfer.engine.core import EngineCore
from roseinfer.sched.policy import Admitted, Decision, Ended, Event, Policy, Queued, View
from tests.helpers.engines import Collected, submitted


class Watched:
    """A policy that another one decides for. `waited`: seconds without a seat, by sequence; `starts`: how many."""

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self._policy, self._clock = policy, clock
        self._since_s: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.starts: dict[str, int] = {}

    def begin(self, view: View) -> Decision:
        return self._policy.begin(view)

    def observe(self, event: Event) -> None:
        self._policy.observe(event)
        if isinstance(event, Queued):
            request = event.request
            self._since_s[request.request_id] = self._clock.now() if request.preemptions else request.arrival_s
        elif isinstance(event, Admitted | Ended):
            since_s = self._since_s.pop(event.request_id, event.now_s)
            self.waited[event.request_id] = self.waited.get(event.request_id, 0.0) + event.now_s - since_s
        if isinstance(event, Admitted):
            self.starts[event.request_id] = self.starts.get(event.request_id, 0) + 1


def watch(core: EngineCore) -> Watched:
    watched = Watched(core.scheduler.policy, core.clock)
    core.scheduler.policy = watched
    return watched


def check_whys(core: EngineCore, watched: Watched, done: dict[str, Collected]) -> None:
    """Assert that reports of ended requests add up: seconds waited, rows computed, steps without a row."""
    rows: dict[str, list[int]] = {}  # in which steps
    sampled: dict[str, list[int]] = {}
    for plan in submitted(core):
        for row in plan.rows:
            rows.setdefault(row.request_id, []).append(plan.step)
            if row.sample:
                sampled.setdefault(row.request_id, []).append(plan.step)
    for name, each in done.items():
        assert each.end is not None and each.end.why is not None, name
        why, own = each.end.why, rows.get(name, [])
        if each.reason is FinishReason.STOP:  # a later row was in vain
            last = sampled[name][max(1, len(each.tokens)) - 1] if core.scheduler.drafting is None else own[-1]
            own = [step for step in own if step <= last]
            if core.scheduler.drafting is not None and why.steps - why.sat_out == len(own) - 1:
                own.pop()  # how many tokens its rows gave is not known here
        check(why, watched.waited.get(name, 0.0), len(own))
        assert (why.steps > 0) == (name in watched.starts), name
        assert why.chunks <= len(own)
        if watched.starts.get(name) == 1 and each.reason is FinishReason.LENGTH:
            assert why.steps == own[-1] - own[0] + 1, name
    core.scheduler.roster.waits.check_integrity(live=())


def check(why: Why, waited_s: float, rows: int) -> None:
    seconds = [seconds for _, seconds in why.waited]
    assert sum(seconds) == pytest.approx(waited_s, abs=1e-6)
    assert seconds == sorted(seconds, reverse=True) and all(each > 0 for each in seconds)
    assert why.steps - why.sat_out == rows and why.sat_out >= 0
