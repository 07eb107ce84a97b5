"""Pricing of drafts: chances against costs, within what the policy leaves."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from roseinfer.core.plan import Row, StepPlan
from roseinfer.core.request import Prompt, Request
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.cost.drafts import DraftCost, features
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.chances import ChanceTable, RequestChances, learn
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.marginal import (
    MAX_DRAFTED_STEPS,
    MAX_EARLY_DRAFTED_STEPS,
    MarginalPricing,
)
from roseinfer.sched.drafting.pricing import DraftCandidate
from roseinfer.sched.drafting.probes import MAX_LONG_PAUSE_STEPS, MAX_PAUSE_STEPS, PROBE_STEPS, Probes
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.sched.drafting.yields import KNOWN_STEPS_COUNT, MIN_REQUESTS_COUNT, DraftYields
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import NO_LIMITS, DraftRoom
from tests.helpers.drafters import proposal
from tests.helpers.engines import add, make_core, run_dry, submitted
from tests.helpers.kv_managers import kv_manager

GPU = CostParams(
    step_s=4e-3, token_s=17e-6, row_s=13e-6, context_s=30e-9, drafts=DraftCost(0.2e-3, 60e-6, 8e-6, 17e-6, 1e-9)
)
CPU = CostParams(step_s=2e-3, token_s=64e-6, row_s=80e-6, drafts=DraftCost(0.0, 60e-6, 60e-6, 60e-6, 0.0))


def known(params: CostParams, steps: int = KNOWN_STEPS_COUNT) -> CostModel:
    """A model that has seen some steps, as they were predicted."""
    model = CostModel(params)
    for _ in range(steps):
        work = CostParams().work([Row("a", 0, 100, 1, 1, True, 100, 0, ())])
        model.observe(work, params.seconds(work))
    return model


TRIED_COUNT = 8  # guesses of a try


class Step:
    """A step of decoding requests, each with as many guesses as `guesses`, and the pricing that is asked."""

    def __init__(self, params: CostParams, count: int, guesses: int | Sequence[float] = 4, **options: bool) -> None:
        self.yields = DraftYields()
        self.pricing = MarginalPricing(known(params), self.yields, **options)
        self.requests = [
            Request(f"{i}:0", Prompt(list(range(100)), SequenceParams(max_tokens=500))) for i in range(count)
        ]
        for request in self.requests:
            request.seat, request.planned, request.tokens = 0, 100, [*request.tokens, 7]
        chances = () if isinstance(guesses, int) else tuple(guesses)
        self.proposal = Proposal("test", (7,) * (guesses if isinstance(guesses, int) else len(guesses)), chances)
        self.number = 0

    def choose(self, room: DraftRoom = NO_LIMITS, limit: int = 10_000, *, guessed: bool = True) -> list[int] | None:
        """The drafts of each request in the next step; None if nothing was to be proposed. `guessed`: something was."""
        builder = PlanBuilder(self.number, 8192, kv_manager(1, 16))
        self.number += 1
        for request in self.requests:
            request.planned = 100
            builder.add_next_token(request)
        if not self.pricing.begin(builder.step, self.requests, room):
            return None
        asked = [request for request in self.requests if guessed and self.pricing.considers(request)]
        counts = self.pricing.choose(builder, [DraftCandidate(r, self.proposal) for r in asked], limit)
        found = dict(zip((r.request_id for r in asked), counts, strict=True))
        return [found.get(request.request_id, 0) for request in self.requests]

    def learn(self, counts: Sequence[int], right: float, rng: random.Random) -> None:
        """Verify drafts, each of which is right with this chance."""
        for request, drafted in zip(self.requests, counts, strict=True):
            if drafted:
                accepted = next((i for i in range(drafted) if rng.random() >= right), drafted)
                self.pricing.verified(DraftCandidate(request, self.proposal), drafted, accepted)

    def run(self, steps: int, right: float, seed: int = 0) -> list[int]:
        """The drafts of each step."""
        rng, sums = random.Random(seed), []
        for _ in range(steps):
            counts = self.choose() or [0] * len(self.requests)
            self.learn(counts, right, rng)
            sums.append(sum(counts))
        return sums


# --- chances against costs ----------------------------------------------------------------------------------------
def test_certain_guesses_are_all_verified_and_hopeless_ones_are_not() -> None:
    assert Step(GPU, 1, [1.0] * 8).choose() == [8]
    step = Step(GPU, 1, [0.01] * 8)
    assert step.choose() == [1], "one is tried, whatever it costs"
    assert step.choose() is None


def test_the_more_requests_run_the_fewer_drafts_each_gets() -> None:
    means = [sum(Step(GPU, count, [0.7] * 8).choose() or ()) / count for count in (1, 16, 64, 200)]
    assert means == sorted(means, reverse=True) and means[0] >= 6 and means[-1] <= 3


def test_where_each_token_takes_its_time_only_probable_guesses_pay() -> None:
    assert sum(Step(CPU, 16, [0.9] * 4).choose() or ()) == 64
    step = Step(CPU, 64, [0.3] * 4)
    assert sum(step.choose() or ()) == 8, "some are tried"
    assert step.choose() is None


def test_a_try_that_begins_without_guesses_verifies_the_first_ones() -> None:
    step = Step(CPU, 64, [0.3] * 4)
    assert sum(step.choose(guessed=False) or ()) == 0
    assert sum(step.choose() or ()) == 8
    assert step.choose() is None


def test_the_likeliest_guesses_come_first() -> None:
    step = Step(GPU, 2, [0.9, 0.2])
    assert step.choose(limit=2) == [1, 1]


def test_proposals_are_compared_by_their_expected_right_guesses() -> None:
    step = Step(GPU, 1)
    long, short = Proposal("test", (1,) * 8, (0.3,) * 8), Proposal("test", (1, 2), (0.9, 0.9))
    expected = [step.pricing.expected(DraftCandidate(step.requests[0], one)) for one in (long, short)]
    assert expected[1] > expected[0] and expected[1] == pytest.approx(0.9 + 0.81, rel=0.01)


def test_tokens_that_a_guide_forces_are_certain_whatever_the_proposer_is_worth() -> None:
    step = Step(GPU, 1)
    guesses = Proposal("test", (1, 2, 3), (), 0)
    for _ in range(50):
        step.pricing.verified(DraftCandidate(step.requests[0], guesses), 3, 0)
    step.proposal = guesses.after((5, 6), 5)
    assert step.pricing.expected(DraftCandidate(step.requests[0], step.proposal)) == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("planned", "draft_s", "drafted"), [(False, 8e-6, 0), (True, 8e-6, 1), (True, 8e-3, 0)])
def test_a_step_of_a_plan_verifies_what_pays_for_itself(planned: bool, draft_s: float, drafted: int) -> None:
    """Drafts must also pay for what a verifying step takes longer, but not under a plan."""
    step = Step(replace(GPU, drafts=DraftCost(5e-3, draft_s, draft_s, draft_s, 0.0)), 4, [0.5])
    step.choose(DraftRoom(inf, planned=planned))  # the first step tries some drafts in any case
    assert (step.choose(DraftRoom(inf, planned=planned)) or [0] * 4) == [drafted] * 4


# --- what is learnt -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("true", [0.2, 0.8])
def test_shares_of_right_guesses_are_learnt_whatever_the_proposer_believes(true: float) -> None:
    for estimate in (None, 0.5, 0.95):
        table, rng = ChanceTable(), random.Random(1)
        proposal = Proposal("test", (1, 2), (estimate, estimate) if estimate else ())
        for _ in range(600):
            learn(table, RequestChances(), proposal, 1, int(rng.random() < true))
        assert table.shares(proposal)[0] == pytest.approx(true, abs=0.08)
        assert table.shares(proposal)[1] == pytest.approx(estimate or 0.5), "other positions are as before"


@pytest.mark.parametrize("count", [1, 64])
def test_a_proposer_that_is_mostly_wrong_is_hardly_verified_any_more(count: int) -> None:
    drafts = Step(GPU, count).run(400, right=0.1)
    assert sum(drafts[200:]) < 0.1 * 4 * count * 200
    drafts = Step(GPU, count).run(400, right=0.9)
    assert sum(drafts[200:]) > 0.6 * 4 * count * 200


def test_a_request_whose_guesses_are_wrong_pauses_and_others_do_not() -> None:
    step, rng = Step(GPU, 8), random.Random(2)
    drafts = [0, 0]
    for _ in range(300):
        counts = step.choose() or [0] * 8
        step.learn([0, *counts[1:]], 0.9, rng)
        if counts[0]:
            step.pricing.verified(DraftCandidate(step.requests[0], step.proposal), counts[0], 0)
        drafts[0] += counts[0]
        drafts[1] += counts[1]
    assert drafts[0] < 0.1 * drafts[1]


def test_now_and_then_a_step_has_no_drafts_so_that_a_change_of_speed_is_seen() -> None:
    drafts = Step(GPU, 4, [1.0] * 4).run(3 * MAX_DRAFTED_STEPS, right=1.0)
    assert 2 <= drafts.count(0) <= 3


def test_that_is_more_frequent_while_few_such_steps_are_known() -> None:
    step = Step(GPU, 4, [1.0] * 4)
    step.pricing = MarginalPricing(known(GPU, 16), step.yields)
    drafts = step.run(40, right=1.0)
    assert drafts.count(0) == 40 // (MAX_EARLY_DRAFTED_STEPS + 1)


def test_nothing_is_verified_before_the_cost_of_plain_steps_is_known() -> None:
    step = Step(GPU, 1, [1.0] * 4)
    step.pricing = MarginalPricing(CostModel(GPU), step.yields, learns=True)
    assert step.choose() is None
    row = Row("0:0", 0, 100, 1, 1, True, 100, 0, ())
    for number in range(8):
        step.pricing.step_done(StepPlan(number, [row], num_tokens=1), 4e-3, 4e-3)
    assert step.choose() == [4]


# --- what the policy leaves -----------------------------------------------------------------------------------------
def test_drafts_stay_within_the_time_that_the_policy_leaves() -> None:
    drafts = GPU.draft_cost
    for room_s in (0.0, 0.1e-3, 0.5e-3, 1e-3, inf):
        counts = Step(GPU, 32, [0.9] * 8).choose(DraftRoom(room_s)) or []
        if sum(counts) == TRIED_COUNT:  # the first step is a try, which needs no time
            counts = []
        assert sum(counts) == 0 or drafts.seconds(features(32, sum(counts), 101 * sum(counts))) <= room_s * (1 + 1e-9)
        assert (sum(counts) > 0) == (room_s > 0.3e-3)


def test_requests_that_need_several_tokens_a_step_get_drafts_first() -> None:
    step = Step(GPU, 200, [0.4] * 4)
    counts = step.choose(DraftRoom(0.0, ("3:0",))) or []
    assert counts[3] >= 3 and sum(counts) == counts[3]
    assert step.pricing.worthwhile(step.requests), "also while drafts do not pay otherwise"


def test_such_requests_do_not_pause() -> None:
    step = Step(GPU, 2)
    for request in step.requests:
        for _ in range(4):
            step.pricing.verified(DraftCandidate(request, step.proposal), 4, 0)
    counts = step.choose(DraftRoom(inf, ("1:0",))) or []
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_drafts_stay_within_the_limit(limit: int) -> None:
    counts = Step(GPU, 16, [0.99] * 8).choose(DraftRoom(inf, ("1:0", "2:0")), limit) or []
    assert 0 < sum(counts) <= limit


# --- the switch -------------------------------------------------------------------------------------------------------
def test_under_load_steps_overlap_again_but_for_a_few() -> None:
    step = Step(CPU, 200, overlap=True)
    on, rng = 0, random.Random(3)
    for _ in range(1000):
        on += step.pricing.worthwhile(step.requests)
        step.learn(step.choose() or [0] * 200, 0.2, rng)
    assert on < 40


def test_drafting_stops_when_it_saves_less_than_the_host_s_time_that_it_exposes() -> None:
    for exposed_s, pays in ((0.0, True), (6e-3, False)):
        step, rng = Step(GPU, 4, [0.6] * 2, overlap=True, learns=True), random.Random(4)
        steps_on = 0
        for _ in range(300):
            on = step.pricing.worthwhile(step.requests)
            steps_on += on
            counts = step.choose() or [0] * 4
            step.learn(counts, 0.6, rng)
            rows = [Row(str(i), 0, 100, 1 + n, 1, True, 100, 0, (), (7,) * n) for i, n in enumerate(counts)]
            device_s = GPU.seconds(GPU.work(rows))
            plan = StepPlan(0, rows, num_drafts=sum(counts))
            step.pricing.step_done(plan, device_s + on * exposed_s, device_s)
        assert (steps_on > 200) == pays


def pauses(running: int, exposed_s: float) -> tuple[Probes, list[int]]:
    """Return probes that never paid in 5,000 steps, and the lengths of their pauses."""
    probes, lengths, off = Probes(), list[int](), 0
    for step in range(5000):
        if probes.on:
            if off:
                lengths.append(off)
            off = 0
            probes.record(step, running, 0.0, exposed_s, guessed=True, drafted=False)
        else:
            off += 1
            probes.skip(step, running)
    while probes.on:
        probes.record(5000, running, 0.0, exposed_s, guessed=True, drafted=False)
    return probes, lengths


def test_pauses_double_and_end_early_with_fewer_requests() -> None:
    probes, lengths = pauses(8, 1e-3)
    assert lengths[:4] == [8, 16, 32, 64] and lengths[-1] == MAX_PAUSE_STEPS
    probes.skip(5001, 7)
    assert not probes.on
    probes.skip(5002, 6)
    assert probes.on


def test_pauses_are_longer_where_a_probe_exposes_the_work_for_many_requests() -> None:
    """Otherwise 36 probes in 20 s with 80 requests cost 1% of the good ones."""
    assert pauses(80, 1e-3)[1][-1] == MAX_LONG_PAUSE_STEPS
    assert MAX_PAUSE_STEPS < pauses(20, 1e-3)[1][-1] < MAX_LONG_PAUSE_STEPS
    assert pauses(80, 0.0)[1][-1] == MAX_PAUSE_STEPS


@pytest.mark.parametrize(("count", "left"), [(2, 1), (4, 3), (100, 75)])
def test_a_pause_ends_when_a_quarter_of_the_requests_has_ended(count: int, left: int) -> None:
    probes = Probes()
    probes.record(0, count, 0.0, 1e-3, guessed=True, drafted=False)
    probes.skip(1, left + 1)
    assert not probes.on
    probes.skip(2, left)
    assert probes.on


def test_a_probe_lasts_some_steps_while_there_are_no_guesses() -> None:
    probes = Probes()
    for step in range(PROBE_STEPS - 1):
        probes.record(step, 1, 0.0, 1e-3, guessed=False, drafted=False)
        assert probes.on
    probes.record(PROBE_STEPS, 1, 0.0, 1e-3, guessed=False, drafted=False)
    assert not probes.on


# --- yields -----------------------------------------------------------------------------------------------------------
def test_a_yield_is_what_most_requests_of_a_tenant_exceed() -> None:
    yields = DraftYields()
    for number in range(MIN_REQUESTS_COUNT):
        assert yields.of("a") is None
        yields.add("a", 100, 150 if number % 4 == 0 else 300, 400)
    found = yields.of("a")
    assert found is not None and found.tokens == 1.5 and found.drafts == 4
    assert yields.of("b") is None


def test_a_promise_of_several_tokens_per_step_counts_the_steps_of_a_head() -> None:
    yields, request = DraftYields(), Step(GPU, 1).requests[0]
    for _ in range(MIN_REQUESTS_COUNT):
        yields.add("", 100, 250, 400)
    params = replace(GPU, drafts=GPU.draft_cost._replace(head_step_s=0.2e-3, head_draft_s=5e-6))
    without = yields.step_s(request, params)
    yields.by_head = True
    assert yields.step_s(request, params) == pytest.approx(without + 4 * 0.205e-3)


def test_steps_whose_drafts_were_too_dear_do_not_count_for_a_yield() -> None:
    step = Step(GPU, 1)
    request = step.requests[0]
    for _ in range(10):
        step.pricing.verified(DraftCandidate(request, step.proposal), 4, 2)
        step.pricing.unguessed(request)
        step.choose(DraftRoom(0.0))
    for _ in range(MIN_REQUESTS_COUNT):
        step.pricing.ended(request)
        step.pricing.verified(DraftCandidate(request, step.proposal), 4, 2)
        step.pricing.unguessed(request)
    step.pricing.ended(request)
    found = step.yields.of("")
    assert found is not None and (found.tokens, found.drafts) == (2.0, 2.0)


class Ended(DraftYields):
    """Record of what was added: steps, tokens and drafts of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[int, int, int]] = []

    def add(self, tenant: str, steps: int, tokens: int, drafts: int) -> None:
        self.added.append((steps, tokens, drafts))


class RightAtFirst:
    """Proposer of four drafts, right ones for the first `right` tokens of the output and wrong ones afterwards."""

    def __init__(self, output: Sequence[int], right: int) -> None:
        self._output = output
        self._right = right

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        done = request.num_outputs
        found = self._output[done : done + min(4, limit)]
        return proposal(found if done < self._right else [(token + 1) % 50 for token in found])

    def ended(self, request: Request) -> None:
        pass


def test_steps_in_which_a_request_pauses_count_for_its_yield() -> None:
    """40 steps of five tokens, then 560 of one."""
    options = {"num_blocks": 200, "max_num_batched_tokens": 32}
    request = {"ignore_eos": True, "seed": 1, "max_tokens": 760}
    plain = make_core(**options)
    add(plain, "a", [5, 9, 2, 7], **request)
    output = run_dry(plain)["a:0"].tokens
    yields = Ended()
    drafting = Drafting([RightAtFirst(output, 200)], MarginalPricing(known(GPU), yields))
    core = make_core(drafting=drafting, **options)
    add(core, "a", [5, 9, 2, 7], **request)
    assert run_dry(core)["a:0"].tokens == output
    ((steps, tokens, _),) = yields.added
    assert tokens / steps == pytest.approx(760 / len(submitted(core)), rel=0.02)


def test_a_step_without_drafts_of_a_request_that_needs_them_counts_for_its_yield() -> None:
    step = Step(GPU, 1, [0.01] * 4)
    step.pricing = MarginalPricing(known(GPU), yields := Ended())
    counts = [step.choose(DraftRoom(inf, ("0:0",))) for _ in range(10)]
    assert counts == [[1], *[[0]] * 9], "only the try has a draft"
    step.pricing.ended(step.requests[0])
    assert yields.added == [(9, 9, 0)]
