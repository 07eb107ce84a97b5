"""Proposers of drafts that know the outputs and are wrong as often as a test wants, and a pricing that takes all."""

import random
from collections.abc import Collection, Sequence

from roseinfer.core.outputs import SequenceOutput
from roseinfer.core.plan import StepPlan
from roseinfer.core.request import Request
from roseinfer.engine.core import EngineCore
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.marginal import MIN_TRUSTED_STEPS, MarginalPricing
from roseinfer.sched.drafting.pricing import DraftCandidate
from roseinfer.sched.drafting.proposer import Proposal, Proposer
from roseinfer.sched.drafting.yields import DraftYields
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import DraftRoom


class EveryDraft:
    """Pricing that verifies all drafts while the budget lasts, in the order of the requests."""

    def worthwhile(self, running: Collection[Request]) -> bool:
        return bool(running)

    def begin(self, step: int, running: Collection[Request], room: DraftRoom) -> bool:
        return True

    def considers(self, request: Request) -> bool:
        return True

    def unguessed(self, request: Request) -> None:
        pass

    def expected(self, candidate: DraftCandidate) -> float:
        return len(candidate.proposal.token_ids)

    def choose(self, builder: PlanBuilder, candidates: Sequence[DraftCandidate], limit: int) -> Sequence[int]:
        counts = []
        for candidate in candidates:
            counts.append(min(limit, len(candidate.proposal.token_ids)))
            limit -= counts[-1]
        return counts

    def ahead(self, builder: PlanBuilder, wanted: Sequence[tuple[Request, int]], limit: int) -> Sequence[int]:
        counts = []
        for _, most in wanted:
            counts.append(min(limit, most))
            limit -= counts[-1]
        return counts

    def verified(self, candidate: DraftCandidate, drafted: int, accepted: int) -> None:
        pass

    def step_done(self, plan: StepPlan, duration_s: float, device_s: float) -> float:
        return duration_s

    def ended(self, request: Request) -> None:
        pass


def every_draft_of(*proposers: Proposer) -> Drafting:
    """Drafting that verifies all that these propose, up to 20 drafts a row."""
    return Drafting(proposers, EveryDraft(), max_drafts=20)


def priced_draft_of(*proposers: Proposer, overlap: bool = False) -> Drafting:
    """Drafting that weighs chances against costs, which it has seen already."""
    cost = CostModel(CostParams(step_s=1e-3, token_s=1e-4, row_s=1e-4))
    for _ in range(MIN_TRUSTED_STEPS):
        cost.observe(Work(decode_rows=1), 1.1e-3)
    return Drafting(proposers, MarginalPricing(cost, DraftYields(), overlap=overlap), max_drafts=20)


def proposal(drafts: Sequence[int]) -> Proposal | None:
    return Proposal("test", tuple(drafts)) if drafts else None


class Script:
    """Proposer of given drafts, one list for each call; of nothing afterwards."""

    def __init__(self, *drafts: Sequence[int]) -> None:
        self.left = list(drafts)
        self.asked: list[int] = []
        self.names: set[str] = set()
        self.gone: list[str] = []

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        self.asked.append(limit)
        self.names.add(request.request_id)
        return proposal(self.left.pop(0)[:limit] if self.left else ())

    def ended(self, request: Request) -> None:
        self.gone.append(request.request_id)


class Oracle:
    """Proposer whose guesses are right with probability `right` as far as `outputs` (by sequence) go, else random."""

    def __init__(self, outputs: dict[str, list[int]], vocab_size: int, right: float, most: int = 5, seed: int = 0):
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._right = right
        self._most = most
        self._rng = random.Random(seed)

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        rng = self._rng
        assert limit >= 1
        known = self._outputs.get(request.request_id, [])
        first = len(request.tokens) - request.prompt_len + len(after)
        drafts = []
        for index in range(first, first + rng.randint(0, min(limit, self._most))):
            right = index < len(known) and rng.random() < self._right
            drafts.append(known[index] if right else rng.randrange(self._vocab_size))
        return proposal(drafts)

    def ended(self, request: Request) -> None:
        pass


class UncheckedDrafts(EngineCore):
    """Engine core that verifies what proposers guess even if a guide forbids it."""

    def launch(self) -> list[SequenceOutput]:
        for request in self.scheduler.roster.requests.values():
            request.guided = False  # for drafting; their rows have masks
        return super().launch()
