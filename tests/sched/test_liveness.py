"""The mechanism keeps the engine going, whatever a policy says."""

from collections.abc import Iterable, Sequence

import pytest

from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.liveness import MAX_IDLE_TURNS
from roseinfer.sched.policies.common.planned import PlannedDecision
from roseinfer.sched.policy import Decision, Event, FallbackDecision, View
from tests.helpers.cases import cases, each_value
from tests.helpers.engines import Collected, add, gather, make_core, run_dry

POLICIES = ["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"]


class Silent:
    """A policy that lets nobody do anything."""

    def begin(self, view: View) -> Decision:
        return PlannedDecision([], {})

    def observe(self, event: Event) -> None:
        """Learns nothing."""


class Unwilling(PlannedDecision):
    """Decision in which all requests compute and none is preempted."""

    def chunk(self, request: Request, room: int) -> int:
        return room

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting

    def victim(self, running: Sequence[Request]) -> Request | None:
        return None


class NoVictims(Silent):
    def begin(self, view: View) -> Decision:
        chunks = {request.request_id: view.token_budget for request in (*view.running, *view.waiting())}
        return Unwilling(view.running, chunks)


class PreemptingDecision(FallbackDecision):
    """Decision that preempts all running requests, and starts waiting ones whenever it may."""

    def __init__(self, running: Sequence[Request]) -> None:
        self._running = running

    def preemptions(self) -> Iterable[Request]:
        return self._running


class PreemptsAlways(Silent):
    """Policy that preempts every running request in each step."""

    def begin(self, view: View) -> Decision:
        return PreemptingDecision(view.running)


def add_promised(core: EngineCore, name: str, prompt: int, *, n: int = 1, length: int, slo: Slo, **fields: int) -> None:
    params = SequenceParams(max_tokens=length, min_tokens=length - 1, ignore_eos=True)
    core.add(Add(name, Prompt([i % 50 for i in range(prompt)], params, RequestMeta(slo=slo, **fields)), n))


@each_value(policy=POLICIES, depth=[1, 2])
def test_samples_whose_parent_was_preempted_do_not_keep_others_from_starting(policy: str, depth: int) -> None:
    """24 samples in 30 blocks, each of which outlives what was said of it, and somebody behind them."""
    core = make_core(scheduling_policy=policy, max_num_seqs=8, num_blocks=30, block_size=16, depth=depth)
    done: dict[str, Collected] = {}
    add_promised(core, "family", 12, n=24, length=60, slo=Slo(tpot_s=2.0), predicted_len=8)
    for _ in range(30):
        gather(core.step(), done)
    add_promised(core, "bystander", 12, length=5, slo=Slo(tpot_s=2.0))
    run_dry(core, done, max_steps=20_000)
    assert len(done["bystander:0"].tokens) == 5
    assert all(len(done[f"family:{i}"].tokens) == 60 for i in range(24))
    assert core.scheduler.stats().preemptions > 0
    assert core.scheduler.stats().policy_stalls == 0, "the policy itself goes on"


def test_a_policy_that_starts_nobody_cannot_stop_the_engine() -> None:
    core = make_core()
    core.scheduler.policy = Silent()
    for name in ("a", "b"):
        add(core, name, [1, 2, 3], max_tokens=3, ignore_eos=True)
    assert core.step(), "the first starts at once"
    done = run_dry(core)
    assert len(done["b:0"].tokens) == 3
    assert core.scheduler.stats().policy_stalls >= 2


def test_who_starts_whatever_the_policy_says_is_the_first_in_the_queue() -> None:
    core = make_core()
    core.scheduler.policy = Silent()
    for name in ("a", "b"):
        add(core, name, [1, 2, 3], max_tokens=1, ignore_eos=True)
    assert [output.request_id for output in core.step()] == ["a:0"]


def test_a_policy_may_hold_running_requests_back_for_a_moment_but_not_for_ever() -> None:
    core = make_core()
    add(core, "a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    core.step()
    core.scheduler.policy = Silent()
    turns = 0
    while not core.step():
        turns += 1
    assert turns == MAX_IDLE_TURNS
    assert core.scheduler.stats().policy_stalls == 1


def test_a_policy_that_never_takes_blocks_from_anybody_cannot_stop_the_engine() -> None:
    core = make_core(num_blocks=6, block_size=4, prefix_caching=False)
    core.scheduler.policy = NoVictims()
    for name in ("a", "b"):
        add(core, name, [1, 2, 3], max_tokens=20, ignore_eos=True)
    done = run_dry(core)
    assert [len(done[name].tokens) for name in ("a:0", "b:0")] == [20, 20]
    assert core.scheduler.stats().policy_stalls > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_that_preempts_everything_in_each_step_cannot_stop_the_engine(depth: int) -> None:
    """The prompt needs several steps, and each preemption discards what was computed."""
    core = make_core(max_num_seqs=2, max_num_batched_tokens=32, num_blocks=64, prefix_caching=False, depth=depth)
    core.scheduler.policy = PreemptsAlways()
    for name in ("a", "b"):
        add(core, name, [i % 50 for i in range(199)], max_tokens=3, ignore_eos=True)
    done = run_dry(core, max_steps=1000)
    assert [len(done[name].tokens) for name in ("a:0", "b:0")] == [3, 3]
    assert core.scheduler.stats().policy_stalls > 0


def test_nothing_is_a_stall_while_a_step_is_in_flight() -> None:
    """At depth 2 the next plan is often empty because the last token is on its way."""
    core = make_core(depth=2)
    collected: dict[str, Collected] = {}
    for i in range(4):
        add(core, str(i), [1, 2, 3], max_tokens=2, ignore_eos=True)
        gather(core.step(), collected)
    run_dry(core, collected)
    assert core.scheduler.stats().policy_stalls == 0


@cases("policy", ["scorpio"], exhaustive=[name for name in POLICIES if name != "scorpio"])
def test_requests_that_take_each_other_s_blocks_come_to_an_end(policy: str) -> None:
    """Scorpio computes prompts before it lets anybody decode: those that restart here take each other's blocks, and
    none of them would ever get a token.
    """
    core = make_core(
        scheduling_policy=policy,
        max_num_seqs=33,
        max_num_batched_tokens=8,
        num_blocks=10,
        block_size=16,
        depth=2,
        prefix_caching=False,
    )
    add_promised(core, "many", 6, n=24, length=71, slo=Slo(tpot_s=2.0))
    add_promised(core, "one", 9, length=79, slo=Slo(tpot_s=2.0))
    add_promised(core, "two", 2, n=2, length=74, slo=Slo(ttft_s=30.0, tpot_s=1.0))
    done = run_dry(core, max_steps=100_000)
    assert sum(len(each.tokens) for each in done.values()) == 24 * 71 + 79 + 2 * 74
    assert (core.scheduler.stats().policy_stalls > 0) == (policy == "scorpio")


def test_whoever_ends_leaves_the_others_a_fresh_start() -> None:
    core = make_core(max_num_seqs=2)
    liveness = core.scheduler.roster.liveness
    add(core, "a", [1, 2, 3])
    core.step()
    for _ in range(4):
        assert not liveness.livelock
        liveness.preempted(core.scheduler.policy)
    assert liveness.livelock
    core.abort(["a:0"])
    assert not liveness.livelock
    run_dry(core)
