"""Plan of drafts: what decoding requests take of the machine with and without them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.yields import DraftYields
from roseinfer.sched.policies.common.draft_plan import NO_DRAFTS, DraftPlan, best_plan
from roseinfer.sched.policies.common.ledger import Track

TPOT_S = 0.008
RIGHT = (0.55, 0.85, 1.0, 1.1)  # drafts of a row, of 1, 2, ...


def tracks(count: int) -> Sequence[Track]:
    """Decoding requests after 500 tokens each."""
    return cast(Any, [SimpleNamespace(tpot_s=TPOT_S, least_tokens=1.0, tokens=range(500)) for _ in range(count)])


def params(many_draft_s: float) -> CostParams:
    drafts = DraftCost(1e-3, 30e-6, 16e-6, many_draft_s, 2e-9)
    return CostParams(step_s=4.7e-3, token_s=12.5e-6, row_s=8e-6, context_s=40e-9, drafts=drafts)


def plan(rows: int, prompt_tokens: int, many_draft_s: float = 40e-6, present: DraftPlan = NO_DRAFTS) -> DraftPlan:
    yields = DraftYields()
    yields.expect([RIGHT] * rows, prompt_tokens)
    return best_plan(yields, params(many_draft_s), tracks(rows), present)


def test_drafts_make_room_in_a_machine_that_is_full_of_steps() -> None:
    found = plan(40, prompt_tokens=0, many_draft_s=16e-6)
    assert found.drafts > 0
    assert found.tokens > 1.3


def test_dear_drafts_are_not_planned_beside_prompts() -> None:
    """In a step of more than 128 tokens a draft costs 40 microseconds instead of 16, and prompts bring it there."""
    assert plan(40, prompt_tokens=0).drafts > 0
    assert plan(40, prompt_tokens=120).drafts == 0


def test_a_plan_stays_while_it_saves_less_than_it_needs_to_begin() -> None:
    between = next(s for s in (1e-6 * n for n in range(16, 60)) if not plan(60, 80, s).drafts)
    assert plan(60, 80, between).drafts == 0
    assert plan(60, 80, between, present=DraftPlan(1.7, 2)).drafts > 0
    assert plan(60, 80, 3 * between, present=DraftPlan(1.7, 2)).drafts == 0
