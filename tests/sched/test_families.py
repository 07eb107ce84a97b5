"""The samples of one request wait as one entry."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.policy import Decision, Event, Policy, View
from roseinfer.sched.queue import WaitingQueue
from tests.helpers.cases import examples
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted


class Seen:
    """A policy that another one decides for; keeps who was shown as waiting, by step."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.waiting: list[list[str]] = []
        self.members: list[int] = []

    def begin(self, view: View) -> Decision:
        shown = view.waiting()
        self.waiting.append([request.request_id for request in shown])
        self.members.append(sum(len(view.members(lead)) for lead in shown))
        assert all(view.can_start(request) for request in shown)
        return self._policy.begin(view)

    def observe(self, event: Event) -> None:
        self._policy.observe(event)


def watched(policy: str = "fifo", **options: object) -> tuple[EngineCore, Seen]:
    core = make_core(scheduling_policy=policy, **options)
    core.scheduler.policy = seen = Seen(core.scheduler.policy)
    return core, seen


def test_samples_are_one_entry_before_and_after_their_prompt_is_computed() -> None:
    core, seen = watched(max_num_seqs=3)
    add(core, "a", [1, 2, 3], max_tokens=4, n=6, ignore_eos=True)
    add(core, "b", [4, 5, 6], max_tokens=4, ignore_eos=True)
    done = run_dry(core)
    assert seen.waiting[:2] == [["a:0", "b:0"], ["a:1"]]
    assert seen.members[:2] == [2, 5]
    assert max(map(len, seen.waiting)) == 2
    assert all(len(each.tokens) == 4 for each in done.values()) and len(done) == 7


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"])
def test_all_samples_start_in_the_step_after_their_prompt(policy: str) -> None:
    core = make_core(scheduling_policy=policy, max_num_seqs=16)
    params = SequenceParams(max_tokens=4, ignore_eos=True)
    core.add(Add("a", Prompt([1, 2, 3], params, RequestMeta(slo=Slo(ttft_s=10.0, tpot_s=10.0))), 9))
    run_dry(core)
    assert [len(plan.admitted) for plan in submitted(core)][:2] == [1, 8]


def test_samples_of_one_request_do_not_fill_the_window_of_slack() -> None:
    """24 samples could start but lack blocks to run to their end; who is behind them is looked at all the same."""
    core, seen = watched("slack", max_num_seqs=40, num_blocks=64, block_size=4)
    new = Add(
        "many", Prompt([1] * 8, SequenceParams(max_tokens=20, ignore_eos=True), RequestMeta(slo=Slo(tpot_s=5.0))), 24
    )
    core.add(new)
    core.add(
        Add("other", Prompt([2] * 4, SequenceParams(max_tokens=4, ignore_eos=True), RequestMeta(slo=Slo(tpot_s=5.0))))
    )
    done: dict[str, Collected] = {}
    while "other:0" not in done:
        gather(core.step(), done)
    assert len(submitted(core)) < 30
    assert max(map(len, seen.waiting)) <= 2
    run_dry(core, done)


def test_a_preempted_sample_0_leads_its_family_again_from_the_head_of_the_queue() -> None:
    core, seen = watched(max_num_seqs=3)
    done: dict[str, Collected] = {}
    add(core, "a", [i % 50 for i in range(16)], max_tokens=12, n=4, ignore_eos=True)
    add(core, "b", [7, 8], max_tokens=4, ignore_eos=True)
    for _ in range(3):
        gather(core.step(), done)
    assert seen.waiting[-1] == ["a:2"] or seen.waiting[-1][0] in ("a:2", "a:3")
    scheduler = core.scheduler
    scheduler.roster.preempt(scheduler.running["a:0"])
    gather(core.step(), done)
    assert seen.waiting[-1][0] == "a:0" and "b:0" not in seen.waiting[-1][:1]
    assert len([name for name in seen.waiting[-1] if name.startswith("a")]) == 1
    run_dry(core, done)
    assert all(len(done[f"a:{i}"].tokens) == 12 for i in range(4))


def test_a_preempted_sample_comes_before_its_siblings_that_never_ran() -> None:
    queue = WaitingQueue(lambda request: False)
    samples = [Request(f"a:{i}", Prompt([1], SequenceParams()), fork_of="a:0" if i else None) for i in range(4)]
    for sample in samples[1:]:
        queue.add(sample)
    queue.discard(samples[3])
    queue.add_first(samples[3])
    assert queue.ready() == [samples[3]]
    assert queue.members(samples[3]) == (samples[3], samples[1], samples[2])
    queue.check_integrity()


@examples(200, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_entries_and_requests_agree_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    blocked: set[str] = set()
    queue = WaitingQueue(lambda request: request.fork_of in blocked)
    outside = [
        Request(f"{family}:{i}", Prompt([1], SequenceParams()), fork_of=f"{family}:0" if i else None)
        for family in range(4)
        for i in range(rng.choice([1, 1, 3, 5]))
    ]
    inside: list[Request] = []
    for _ in range(60):
        if outside and rng.random() < 0.5:
            request = outside.pop(rng.randrange(len(outside)))
            back = rng.random() < 0.4
            (queue.add_first if back else queue.add)(request)
            inside.append(request)
            blocked = set()
            if back:
                assert queue.family(queue.ready()[0])[0] is request, "it stands first, in its family and with it"
        elif inside:
            request = inside.pop(rng.randrange(len(inside)))
            queue.discard(request)
            queue.discard(request)
            outside.append(request)
        blocked = {f"{family}:0" for family in range(4) if rng.random() < 0.3}
        queue.check_integrity()
        assert len(queue) == len(inside) and set(queue) == set(inside)
        shown = queue.ready()
        assert queue.first_ready() == (shown[0] if shown else None)
        assert all(queue.leads(lead) and queue.can_start(lead) for lead in shown)
        startable = {r for r in inside if queue.can_start(r)}
        families = [request.fork_of or request.request_id for request in shown]
        assert len(set(families)) == len(families), "one entry each"
        sample_0_waits = {r.request_id for r in inside if r.fork_of is None}
        for lead in shown:
            family = lead.fork_of or lead.request_id
            mates = {r for r in startable if (r.fork_of or r.request_id) == family}
            assert set(queue.members(lead)) == ({lead} if family in sample_0_waits else mates)
