"""Pricing: the interface of what decides how many drafts a step verifies."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from roseinfer.core.plan import StepPlan
from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import DraftRoom


class DraftCandidate(NamedTuple):
    """A decoding request in the step that is planned, and guesses of its next tokens."""

    request: Request
    proposal: Proposal


class Pricing(Protocol):
    """Choice of the requests for which drafts are proposed, and of the drafts that a step verifies."""

    def worthwhile(self, running: Collection[Request]) -> bool:
        """Return False if no draft could pay with these requests, so that nothing is proposed.

        Asked before each plan. While it is true, a step is committed before the next one is planned, since proposers
        need to know all tokens.
        """
        ...

    def begin(self, step: int, running: Collection[Request], room: DraftRoom) -> bool:
        """Return True if the step that is planned may have drafts. Called for each plan, before all that follows."""
        ...

    def considers(self, request: Request) -> bool:
        """Return False for a request for which nothing should be proposed in this step."""
        ...

    def unguessed(self, request: Request) -> None:
        """Learn that a step has no guesses for a decoding request: no proposer had one, or `considers` was False."""
        ...

    def expected(self, candidate: DraftCandidate) -> float:
        """Return how many guesses will probably be right. Of a request's proposals the best is kept."""
        ...

    def choose(self, builder: PlanBuilder, candidates: Sequence[DraftCandidate], limit: int) -> Sequence[int]:
        """Return how many leading drafts of each candidate to verify, at most `limit` together.

        Asked in each step that may have drafts, without candidates too.
        """
        ...

    def ahead(self, builder: PlanBuilder, wanted: Sequence[tuple[Request, int]], limit: int) -> Sequence[int]:
        """Return how many drafts the runner's head makes after each of these requests' rows, for the next step.

        `wanted`: requests and the most drafts of each. `limit`: of all of them together. Asked after `choose`.
        """
        ...

    def verified(self, candidate: DraftCandidate, drafted: int, accepted: int) -> None:
        """Learn that `accepted` of the `drafted` leading guesses were right."""
        ...

    def step_done(self, plan: StepPlan, duration_s: float, device_s: float) -> float:
        """Learn what a step took, as `StepDone` has it, and on the device alone.

        Return what a step with this work takes. While drafting is on, each step exposes the host's work: that is part
        of what drafts cost, not of what a step without drafts does.
        """
        ...

    def ended(self, request: Request) -> None:
        """Forget a request."""
        ...
