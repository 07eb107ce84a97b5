"""The seam between scheduler and policy: snapshots go out, what comes back is checked, rejections go their own way."""

from collections.abc import Callable, Iterable, Sequence

import pytest

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt, Request
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Rejection
from roseinfer.engine.core import EngineCore
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.policy import Decision, Event, FallbackDecision, RejectedRequest, Verdict, View
from roseinfer.sched.prefill import PrefillOptions
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted

TOO_LATE = Rejection("ttft", 1.0)


class Asked:
    """A policy whose every decision is made by a function of the view."""

    def __init__(self, decide: Callable[[View], Decision]) -> None:
        self.decide = decide

    def begin(self, view: View) -> Decision:
        return self.decide(view)

    def observe(self, event: Event) -> None:
        """Learns nothing."""


class Answers(FallbackDecision):
    """A decision some of whose answers are given."""

    def __init__(
        self,
        rows: Iterable[Request] | None = None,
        starts: Iterable[Request] | None = None,
        refused: Iterable[Request] = (),
        victim: Request | None = None,
    ) -> None:
        self._rows, self._starts, self._refused, self._victim = rows, starts, refused, victim

    def rejections(self) -> Iterable[RejectedRequest]:
        return (RejectedRequest(request, TOO_LATE) for request in self._refused)

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        return running if self._rows is None else self._rows

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting if self._starts is None else self._starts

    def victim(self, running: Sequence[Request]) -> Request | None:
        return self._victim or super().victim(running)


def decided_by(decide: Callable[[View], Decision], **options: object) -> EngineCore:
    core = make_core(**options)
    core.scheduler.policy = Asked(decide)
    return core


def faults(core: EngineCore) -> int:
    return core.scheduler.stats().policy_faults


def stranger(name: str = "nobody") -> Request:
    return Request(name, Prompt([1, 2], SequenceParams()))


# --- what goes out ----------------------------------------------------------------------------------------------
def test_a_policy_that_walks_the_queue_lazily_and_turns_some_away_is_fine() -> None:
    class Shedding(FallbackDecision):
        def __init__(self, view: View) -> None:
            self._view = view

        def rejections(self) -> Iterable[RejectedRequest]:
            return (RejectedRequest(request, TOO_LATE) for request in self._view.waiting() if len(request.tokens) > 4)

    core = decided_by(Shedding)
    for i in range(6):
        add(core, str(i), [1] * (2 + i), max_tokens=2, ignore_eos=True)
    done = run_dry(core)
    reasons = [done[f"{i}:0"].reason for i in range(6)]
    assert reasons == [FinishReason.LENGTH] * 3 + [FinishReason.REJECTED] * 3
    assert faults(core) == 0


def test_what_a_policy_is_shown_does_not_change_under_its_hands() -> None:
    seen: list[tuple[Sequence[Request], list[str], Sequence[Request], list[str]]] = []

    def decide(view: View) -> Decision:
        running, waiting = view.running, view.waiting()
        seen.append((running, [r.request_id for r in running], waiting, [r.request_id for r in waiting]))
        return FallbackDecision()

    core = decided_by(decide, max_num_seqs=2)
    for name in "abcd":
        add(core, name, [1, 2, 3], max_tokens=3, ignore_eos=True)
    run_dry(core)
    assert any(names for _, names, _, _ in seen) and any(names for _, _, _, names in seen)
    for running, names, waiting, waited in seen:
        assert [r.request_id for r in running] == names and [r.request_id for r in waiting] == waited


def test_the_snapshot_of_those_that_wait_is_made_once_a_step_and_only_if_somebody_asks() -> None:
    core = make_core(max_num_seqs=1)
    core.scheduler.policy = FifoPolicy(SchedulerConfig(max_num_seqs=1), PrefillOptions())
    made = []
    ready = core.scheduler.waiting.ready
    core.scheduler.waiting.ready = lambda: made.append(1) or ready()
    for name in "abc":
        add(core, name, [1, 2, 3], max_tokens=4, ignore_eos=True)
    core.step()
    assert len(made) == 1
    core.step()
    assert len(made) == 1, "there is no seat, so nobody looks"


# --- what comes back --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_named_twice_or_of_strangers_are_ignored(depth: int) -> None:
    ended: list[Request] = []

    def decide(view: View) -> Decision:
        ended.extend(view.running)
        waiting = view.waiting()
        return Answers(rows=[*view.running, stranger(), *waiting, *reversed(view.running), *ended])

    core = decided_by(decide, depth=depth)
    for i in range(4):
        add(core, str(i), [1, 2, 3], max_tokens=3 + i, ignore_eos=True)
    done = run_dry(core)
    assert [len(done[f"{i}:0"].tokens) for i in range(4)] == [3, 4, 5, 6]
    assert faults(core) > 0
    assert all(len({row.request_id for row in plan.rows}) == len(plan.rows) for plan in submitted(core))


def test_starts_named_twice_of_strangers_or_of_those_that_run_are_ignored() -> None:
    def decide(view: View) -> Decision:
        waiting = view.waiting()
        return Answers(starts=[*view.running, stranger(), stranger("0:0"), *waiting, *waiting])

    core = decided_by(decide)
    for i in range(4):
        add(core, str(i), [1, 2, 3], max_tokens=3, ignore_eos=True)
    done = run_dry(core)
    assert [len(done[f"{i}:0"].tokens) for i in range(4)] == [3] * 4
    assert faults(core) > 0


def test_a_sample_that_waits_for_its_prompt_cannot_be_started() -> None:
    def decide(view: View) -> Decision:
        return Answers(starts=[*core.scheduler.waiting])

    core = decided_by(decide)
    add(core, "a", [1, 2, 3], max_tokens=3, n=3, ignore_eos=True)
    done = run_dry(core)
    assert [len(done[f"a:{i}"].tokens) for i in range(3)] == [3] * 3
    # Two beside sample 0 in the first step, and in the second one that had started with its lead.
    assert faults(core) == 3


def test_who_has_begun_is_not_turned_away() -> None:
    def decide(view: View) -> Decision:
        return Answers(refused=[*view.running, stranger(), *view.waiting(), *view.waiting()])

    core = make_core()
    add(core, "runs", [1, 2, 3], max_tokens=4, n=2, ignore_eos=True)
    done: dict[str, Collected] = {}
    gather(core.step(), done)
    add(core, "waits", [1, 2, 3], max_tokens=4, n=2, ignore_eos=True)
    core.scheduler.policy = Asked(decide)
    gather(core.step(), done)
    assert [done[f"waits:{i}"].reason for i in range(2)] == [FinishReason.REJECTED] * 2
    # The row, the stranger, the sample whose prompt is computed, then the same again and the one that has just ended.
    assert faults(core) == 5
    core.scheduler.policy = Asked(lambda view: FallbackDecision())
    run_dry(core, done)
    assert [len(done[f"runs:{i}"].tokens) for i in range(2)] == [4, 4]


def test_only_who_runs_gives_up_blocks() -> None:
    core = decided_by(lambda view: Answers(victim=stranger("0:0")), num_blocks=6, block_size=4, prefix_caching=False)
    for i in range(2):
        add(core, str(i), [1, 2, 3], max_tokens=20, ignore_eos=True)
    done = run_dry(core)
    assert [len(done[f"{i}:0"].tokens) for i in range(2)] == [20, 20]
    assert faults(core) > 0


# --- rejections -------------------------------------------------------------------------------------------------
def test_a_rejection_is_told_in_its_step_also_if_that_preempts_somebody() -> None:
    refused_at: list[int] = []

    def decide(view: View) -> Decision:
        if core.scheduler.stats().preemptions == 0 and view.num_waiting and len(view.running) == 2:
            lacking = sum(r.planned == r.capacity for r in view.running)
            if view.free_blocks == 0 and lacking:
                refused_at.append(view.step)
                return Answers(refused=view.waiting())
        return Answers(starts=()) if len(view.running) == 2 else Answers()

    core = decided_by(decide, num_blocks=6, block_size=4, prefix_caching=False)
    done: dict[str, Collected] = {}
    for i in range(2):
        add(core, str(i), [1, 2, 3], max_tokens=20, ignore_eos=True)
    gather(core.step(), done)
    add(core, "late", [1, 2, 3], max_tokens=4)
    while not refused_at:
        gather(core.step(), done)
    assert core.scheduler.stats().preemptions == 1, "the step that turned it away preempted somebody"
    assert done["late:0"].reason is FinishReason.REJECTED
    run_dry(core, done)


def test_a_rejection_is_told_also_if_no_seat_and_no_token_is_left() -> None:
    core = decided_by(lambda view: Answers(refused=view.waiting() if view.running else ()), max_num_seqs=1)
    add(core, "runs", [1, 2, 3], max_tokens=4, ignore_eos=True)
    done: dict[str, Collected] = {}
    gather(core.step(), done)
    add(core, "late", [1, 2, 3])
    gather(core.step(), done)
    assert done["late:0"].reason is FinishReason.REJECTED


def test_fifo_admits_nobody_behind_one_that_has_to_wait() -> None:
    """`STOP` ends the step's admission also between samples of one request."""

    class Two(FallbackDecision):
        def __init__(self) -> None:
            self._left = 2

        def admit(self, request: Request) -> Verdict:
            self._left -= 1
            return Verdict.ADMIT if self._left >= 0 else Verdict.STOP

    core = decided_by(lambda view: Two())
    add(core, "a", [1, 2, 3], max_tokens=9, n=5, ignore_eos=True)
    run_dry(core)
    assert [len(plan.admitted) for plan in submitted(core)][:4] == [1, 2, 2, 0]
