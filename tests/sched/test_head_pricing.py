"""Pricing of a head's drafts, which are made a step before they are verified."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import mul

import pytest

from roseinfer.core.plan import Row, StepPlan
from roseinfer.core.request import Prompt, Request
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.chances import DepthChances
from roseinfer.sched.drafting.head import EAGLE
from roseinfer.sched.drafting.marginal import MarginalPricing
from roseinfer.sched.drafting.pricing import DraftCandidate
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.sched.drafting.yields import KNOWN_STEPS_COUNT, DraftYields
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import NO_LIMITS, DraftRoom
from tests.helpers.kv_managers import kv_manager

COSTS = DraftCost(0.5e-3, 40e-6, 10e-6, 20e-6, 0.0, head_step_s=0.22e-3, head_draft_s=2e-6)
GPU = CostParams(step_s=4e-3, token_s=17e-6, row_s=20e-6, context_s=20e-9, drafts=COSTS)
MOST = 7


class Loop:
    """Steps of decoding requests whose head is right with the probability that it says, which depends on the request.

    `drafts`: verified in each step. `asked`: what the head was asked for.
    """

    def __init__(
        self, params: CostParams, count: int, *, overlap: bool = False, steps: int = KNOWN_STEPS_COUNT
    ) -> None:
        cost = CostModel(params)
        for _ in range(steps):
            work = CostParams().work([Row("a", 0, 100, 1, 1, True, 100, 0, ())])
            cost.observe(work, params.seconds(work))
        self.cost = cost
        self.pricing = MarginalPricing(cost, DraftYields(), overlap=overlap)
        self.requests = [
            Request(f"{i}:0", Prompt(list(range(100)), SequenceParams(max_tokens=500))) for i in range(count)
        ]
        for request in self.requests:
            request.seat, request.planned, request.tokens = 0, 100, [*request.tokens, 7]
        self.made = [0] * count
        self.drafts: list[int] = []
        self.asked: list[list[int]] = []
        self._rng = random.Random(0)

    def run(self, steps: int, rights: Sequence[float], room: DraftRoom = NO_LIMITS) -> "Loop":
        for _ in range(steps):
            self._step(rights, room)
        return self

    def _step(self, rights: Sequence[float], room: DraftRoom) -> None:
        builder = PlanBuilder(len(self.asked), 8192, kv_manager(1, 16))
        for request in self.requests:
            request.planned = 100
            builder.add_next_token(request)
        pricing, numbers = self.pricing, range(len(self.requests))
        counts = [0] * len(numbers)
        if pricing.begin(builder.step, self.requests, room):
            # Its estimates are those of a head that knows when it is right.
            offered = {
                i: DraftCandidate(self.requests[i], Proposal(EAGLE, (7,) * self.made[i], (rights[i],) * self.made[i]))
                for i in numbers
                if self.made[i] and pricing.considers(self.requests[i])
            }
            chosen = pricing.choose(builder, list(offered.values()), 1000)
            for (i, candidate), drafted in zip(offered.items(), chosen, strict=True):
                if drafted:
                    accepted = next((n for n in range(drafted) if self._rng.random() >= rights[i]), drafted)
                    pricing.verified(candidate, drafted, accepted)
                counts[i] = drafted
        self.made = [0] * len(numbers)
        if pricing.worthwhile(self.requests):
            self.made = list(pricing.ahead(builder, [(request, MOST) for request in self.requests], 1000))
        self.drafts.append(sum(counts))
        self.asked.append(self.made)
        plan = StepPlan(builder.step, builder.rows, num_tokens=len(numbers))
        pricing.step_done(plan, 4.1e-3, 4e-3)

    def mean(self, number: int, last: int = 100) -> float:
        return sum(asked[number] for asked in self.asked[-last:]) / last


def test_a_good_head_is_asked_for_many_drafts_and_a_poor_one_for_hardly_any() -> None:
    means = [Loop(GPU, 1).run(400, [right]).mean(0) for right in (0.05, 0.6, 0.8, 0.95)]
    assert means == sorted(means) and means[0] < 0.3 and 1 < means[1] < 5 and means[3] > 6


def test_the_more_requests_run_the_fewer_drafts_each_gets() -> None:
    means = [Loop(GPU, count).run(300, [0.7] * count).mean(0) for count in (1, 16, 120)]
    assert means == sorted(means, reverse=True) and means[0] > means[2]


def test_the_dearer_a_draft_step_the_fewer_there_are() -> None:
    means = []
    for head_step_s in (0.05e-3, 0.22e-3, 1e-3, 4e-3):
        params = replace(GPU, drafts=COSTS._replace(head_step_s=head_step_s))
        means.append(Loop(params, 1).run(300, [0.7]).mean(0))
    assert means == sorted(means, reverse=True) and means[0] > 5 and means[2] > 1 and means[3] < 0.3


def test_requests_whose_drafts_are_right_get_more_than_others() -> None:
    loop = Loop(GPU, 2).run(400, [0.9, 0.4])
    assert loop.mean(0) > loop.mean(1) + 1


def test_a_step_that_shows_the_cost_of_plain_ones_makes_no_drafts_either() -> None:
    loop = Loop(GPU, 1, steps=12).run(60, [0.9])
    plain = [number for number, asked in enumerate(loop.asked) if not asked[0] and not loop.drafts[number]]
    assert len(plain) >= 10, "each fourth or fifth, until they are known"


def test_a_poor_head_is_tried_again_and_used_when_it_has_become_good() -> None:
    loop = Loop(GPU, 4).run(500, [0.02] * 4)
    tries = sum(sum(asked) for asked in loop.asked[250:])
    assert 0 < tries < 60, "some first drafts, seldom"
    loop.run(1500, [0.95] * 4)
    assert loop.mean(0) > 4


def test_no_more_is_asked_for_than_the_policy_leaves_time_for() -> None:
    for room_s, most in ((0.0, 0), (1.0e-3, 3), (inf, 7)):
        loop = Loop(GPU, 1).run(150, [0.95], DraftRoom(room_s))
        assert max(asked[0] for asked in loop.asked) <= most
    loop = Loop(GPU, 2).run(150, [0.95, 0.95], DraftRoom(0.0, ("1:0",)))
    assert loop.mean(0) == 0 and loop.mean(1) > 3, "a request that needs several tokens per step gets drafts first"


def test_limits_hold() -> None:
    loop = Loop(GPU, 8).run(100, [0.95] * 8)
    builder = PlanBuilder(1000, 8192, kv_manager(1, 16))
    for request in loop.requests:
        request.planned = 100
        builder.add_next_token(request)
    assert loop.pricing.begin(1000, loop.requests, NO_LIMITS)
    loop.pricing.choose(builder, [], 100)
    counts = loop.pricing.ahead(builder, [(request, i % 3) for i, request in enumerate(loop.requests)], 5)
    assert 0 < sum(counts) <= 5 and all(count <= i % 3 for i, count in enumerate(counts))


@pytest.mark.parametrize("shares", [(0.9, 0.5, 0.2), (0.3, 0.9, 0.9)])
def test_chances_of_depths_are_learnt_from_all_that_were_made(shares: tuple[float, ...]) -> None:
    depths, products = DepthChances(1 / 16), list(accumulate(shares, mul))
    for _ in range(200):
        depths.add(products)
    assert list(depths.products(3)) == pytest.approx(products, rel=0.05)
    assert list(depths.products(5))[4] == pytest.approx(products[2] * shares[2] ** 2, rel=0.2)
    for _ in range(300):
        depths.add([0.8])
    assert list(depths.products(2)) == pytest.approx([0.8, 0.64], rel=0.1), "depths that are not made are forgotten"
