"""KV blocks under slack: promised requests take them from unpromised ones, and only if they suffice."""

import pytest

from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt, Request, RequestMeta, Status
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policy import Decision, Preempting, Queued
from tests.helpers.engines import Collected, gather, make_core, run_dry
from tests.sched.policies.slack.test_slack import state
from tests.sched.queues import State


def preemptions(decision: Decision) -> list[str]:
    assert isinstance(decision, Preempting)
    return [request.request_id for request in decision.preemptions()]


def preempt(made: State, request: Request) -> None:
    """Preempt a request: it loses its blocks and waits to be computed again."""
    request.status, request.seat, request.preemptions = Status.WAITING, None, 1
    request.planned = request.computed = 0
    made.running.remove(request)
    made.waiting.append(request)
    made.policy.observe(Queued(request))


def held(made: State, name: str, tokens: int, **options: float) -> Request:
    request = made.run(name, tokens, **options)
    made.begin()  # sees that it decodes
    return request


# --- best effort makes room ---------------------------------------------------------------------------------------
def test_best_effort_gives_its_blocks_to_a_first_token_that_is_due() -> None:
    made = state(free_blocks=0)
    held(made, "free", 160)
    held(made, "paced", 160, tpot_s=0.050)
    made.wait("due", 100, ttft_s=1.0, tpot_s=0.050)
    decision = made.begin()
    assert (preemptions(decision), made.admitted(decision)) == (["free"], {}), "it starts once the blocks are there"
    assert "free" not in made.decode(decision)


def test_the_last_that_began_yields_and_no_more_of_them_than_it_takes() -> None:
    made = state(free_blocks=0)
    for name in ("first", "second", "third"):
        held(made, name, 160)
    made.wait("due", 100, ttft_s=1.0)
    assert preemptions(made.begin()) == ["third"]


def test_nobody_yields_if_that_is_not_enough() -> None:
    made = state(free_blocks=0)
    held(made, "free", 160)
    made.wait("due", 500, ttft_s=1.0)
    assert preemptions(made.begin()) == []


@pytest.mark.parametrize(("begun", "started"), [(False, ["small"]), (True, [])])
def test_who_needs_few_blocks_passes_one_that_lacks_many_unless_that_one_has_begun(
    begun: bool, started: list[str]
) -> None:
    made = state(free_blocks=20)
    held(made, "paced", 160, tpot_s=0.050)
    large = made.wait("large", 500, ttft_s=3.0, predicted=10)
    if begun:
        made.start(large)
        preempt(made, large)
    made.wait("small", 32, ttft_s=5.0, predicted=10)
    assert list(made.admitted(made.begin())) == started


def test_nobody_yields_to_best_effort() -> None:
    made = state(free_blocks=0)
    held(made, "free", 160)
    held(made, "paced", 160, tpot_s=0.050)
    made.wait("also free", 100)
    made.now_s = 60.0
    assert preemptions(made.begin()) == []


def test_nobody_yields_to_a_request_that_could_not_start_all_the_same() -> None:
    """40 rows of 1 ms leave no time for another in steps of 50 ms, blocks or not."""
    made = state(free_blocks=0)
    held(made, "free", 160)
    for i in range(40):
        held(made, f"{i}", 10, tpot_s=0.050)
    made.wait("due", 100, ttft_s=9.0, tpot_s=0.050)
    assert preemptions(made.begin()) == []


def test_nobody_yields_twice() -> None:
    """Else a long one would compute its prompt again and again."""
    made = state(free_blocks=0)
    free = held(made, "free", 160)
    preempt(made, free)
    made.start(free)
    free.planned = free.computed = len(free.tokens) - 1
    held(made, "paced", 10, tpot_s=0.050)
    made.wait("due", 100, ttft_s=1.0, tpot_s=0.050)
    assert preemptions(made.begin()) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_one_of_two_makes_room(depth: int) -> None:
    """Through the scheduler, where blocks that a submitted step names come free a step later."""
    core = make_core(scheduling_policy="slack", num_blocks=30, depth=depth, prefix_caching=False)
    done: dict[str, Collected] = {}
    for name in ("a", "b"):
        submit(core, name, 24, length=32)
    for _ in range(26):
        gather(core.step(), done)
    submit(core, "due", 24, length=4, slo=Slo(ttft_s=100.0, tpot_s=50.0))
    run_dry(core, done)
    assert [len(done[f"{name}:0"].tokens) for name in ("a", "b", "due")] == [32, 32, 4]
    assert core.stats().preemptions == 1
    assert core.stats().policy_faults == 0


def submit(core: EngineCore, name: str, prompt: int, *, length: int, slo: Slo | None = None) -> None:
    params = SequenceParams(max_tokens=length, ignore_eos=True)
    core.add(
        Add(
            name,
            Prompt([1] * prompt, params, RequestMeta(slo=slo, arrival_s=core.clock.now(), predicted_len=length)),
            1,
        )
    )


def test_rejections_for_lack_of_blocks_estimate_the_running_requests_once() -> None:
    """Blocks depend on no objective, and on the same running requests for all rejections."""
    asked: list[str] = []

    class Counted(OracleLengths):
        def left(self, request: Request, outputs: int, share: float | None = None) -> float:
            asked.append(request.request_id)
            return super().left(request, outputs, share)

    made = state(lengths=Counted(), free_blocks=100)
    for i in range(10):
        held(made, f"{i}", 10, tpot_s=0.050, predicted=200)
    for i in range(50):
        made.wait(f"late{i}", 32, ttft_s=0.001 * (1 + i % 3), predicted=1000)
    asked.clear()
    made.now_s = 0.2
    rejections = made.rejected(made.begin())
    assert len(rejections) == 50
    assert {rejection.attainable_s for rejection in rejections.values()} == {None}
    assert len(asked) < 10 * 10


# --- those that had some and were put out -------------------------------------------------------------------------
def test_one_that_was_preempted_queues_by_when_its_next_token_is_due() -> None:
    made = state(seats=1)
    request = made.run("ahead", 10, ttft_s=1.0, tpot_s=0.050)
    made.begin()
    request.tokens += [1] * 100  # for 5 s it needs none
    preempt(made, request)
    assert made.policy.state.ledger.waiting["ahead"].due_s == pytest.approx(101 * 0.050)
    made.wait("later", 10, ttft_s=9.0, tpot_s=0.050)
    assert list(made.admitted(made.begin())) == ["ahead"]
    made.wait("due", 10, ttft_s=2.0, tpot_s=0.050)
    assert list(made.admitted(made.begin())) == ["due"]


def test_who_is_far_ahead_keeps_its_blocks() -> None:
    """Recomputing it before its next token is due would cost the machine as much as any prompt."""
    made = state(free_blocks=25, cost_weight=0.0)
    old = made.run("old", 160, predicted=281, tpot_s=0.050)
    old.tokens += [1] * 120
    old.planned = old.computed = len(old.tokens) - 1
    made.wait("new", 160, predicted=320, ttft_s=9.0, tpot_s=0.050)
    assert list(made.admitted(made.begin())) == []


def test_a_demoted_request_that_starts_again_sets_no_pace() -> None:
    made = state()
    lost = made.run("lost", tpot_s=0.030, predicted=3, first_s=-1.0)
    held(made, "fine", 10, tpot_s=0.3)
    preempt(made, lost)
    made.start(lost)
    found = made.policy.promise(Promise(0.0), 16, lambda request: request.remaining)
    assert found.smallest_s == 0.3
