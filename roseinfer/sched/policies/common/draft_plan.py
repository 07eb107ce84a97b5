"""Draft plan: the drafts that each decoding row gets as a rule, and the tokens per step that admission counts on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from roseinfer.sched.cost.drafts import features
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.drafting.yields import DraftYields
from roseinfer.sched.policies.common.ledger import Track

CHANGE_SHARE = 0.03  # of the machine, which a change from a plan to one with more or fewer drafts has to save
COUNTED_SHARE = 0.85  # of the expected right drafts: rows without luck set the length of steps
BEGIN_SHARE = 0.13  # of the machine, which a plan has to save to come into force
KEPT_SHARE = 0.02  # the same, to stay in force: the end of a plan leaves more requests than there is time for


class DraftPlan(NamedTuple):
    """Tokens per step that a row with `drafts` drafts is expected to have. Without drafts it is 1."""

    tokens: float = 1.0
    drafts: int = 0

    def priced(self, params: CostParams, rows: int, yields: DraftYields) -> CostParams:
        """Return the costs of steps in which each of about `rows` rows has the planned drafts."""
        count = self.drafts * rows
        if not count:
            return params
        cost = params.draft_cost
        others = rows + yields.prompt_tokens
        each_s = (cost.seconds(features(others, count, 0.0)) - cost.verify_s) / count
        each_s += params.experts_s(1, int(others) + count)
        head_s = cost.head_s(self.drafts, 0) if yields.by_head else 0.0
        each_s += cost.head_draft_s if yields.by_head else 0.0
        return replace(
            params,
            step_s=params.step_s + cost.verify_s + head_s,
            row_s=params.row_s + self.drafts * each_s,
            context_s=params.context_s + self.drafts * cost.draft_context_s,
        )


NO_DRAFTS = DraftPlan()


def best_plan(yields: DraftYields, params: CostParams, tracks: Sequence[Track], present: DraftPlan) -> DraftPlan:
    """Return the plan with which the requests of `tracks` take the least of the machine's time.

    Drafts make each row dearer, but the tightest TPOT objective then needs fewer steps, each of which has a constant
    cost. `present`: plan that is in force.
    """
    plans = [NO_DRAFTS, *(DraftPlan(1 + COUNTED_SHARE * gain, drafts) for drafts, gain in enumerate(yields.gains, 1))]
    needed = {plan: _needed(plan, plan.priced(params, len(tracks), yields), tracks) for plan in plans}
    needed[NO_DRAFTS] -= KEPT_SHARE if present.drafts else BEGIN_SHARE
    for plan in plans[1:]:
        needed[plan] += CHANGE_SHARE * (0 < present.drafts != plan.drafts)
    return min(plans, key=needed.__getitem__)


def _needed(plan: DraftPlan, priced: CostParams, tracks: Sequence[Track]) -> float:
    """Return the share of the machine that the decoding requests of `tracks` take."""
    steps = 1 / min([track.tpot_s * max(plan.tokens, track.least_tokens) for track in tracks])
    rows = sum([1 / track.tpot_s for track in tracks]) / plan.tokens
    context = sum([priced.reads.of(len(track.tokens)) / track.tpot_s for track in tracks]) / plan.tokens
    return priced.step_s * steps + priced.row_s * rows + priced.context_s * context
