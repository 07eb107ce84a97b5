"""Drafting: which drafts a planned step verifies, and what came of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from roseinfer.core.config.speculation import MAX_DRAFTS
from roseinfer.core.outputs import DraftRun, DraftStats, accepted_of
from roseinfer.core.plan import Row, StepPlan, StepResult
from roseinfer.core.request import Request, Status
from roseinfer.kv.group import Growth
from roseinfer.kv.manager import KvManager
from roseinfer.sched.drafting.constraints import Constraints
from roseinfer.sched.drafting.counts import ProposerCounts
from roseinfer.sched.drafting.head import HeadProposer
from roseinfer.sched.drafting.pricing import DraftCandidate, Pricing
from roseinfer.sched.drafting.proposer import FORCED, Proposal, Proposer
from roseinfer.sched.drafting.proposers.index_budget import IndexBudget
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import NO_LIMITS, DraftRoom


class _VerifiedRow(NamedTuple):
    """Row with `drafted` drafts, `kept` tokens of which became output."""

    candidate: DraftCandidate
    runs: tuple[DraftRun, ...]
    drafted: int
    kept: int


class Drafting:
    """Proposers, their pricing and their counts, for one scheduler.

    `constraints`: guides of constrained outputs, set by the engine. Without them such requests get no drafts. `counts`:
    by the proposer's name.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        pricing: Pricing,
        max_drafts: int = MAX_DRAFTS,
        head: HeadProposer | None = None,
        index_budget: IndexBudget | None = None,
    ) -> None:
        """`head`: one of the proposers, if the runner has a draft head. `index_budget`: what the proposers share."""
        self.head = head
        self.constraints: Constraints | None = None
        self.counts: dict[str, ProposerCounts] = {}
        self.proposers = proposers
        self._pricing = pricing
        self._index_budget = index_budget or IndexBudget()
        self._max_drafts = max_drafts
        self._verifying: dict[str, DraftCandidate] = {}  # by request, in steps in flight
        self._verified: list[_VerifiedRow] = []  # rows to learn from
        self._ended: list[Request] = []  # requests to learn from

    def wants_known_tokens(self, running: Collection[Request]) -> bool:
        """Return True if the next step may have drafts, for which the tokens of earlier steps must be known."""
        return self._pricing.worthwhile(running)

    def add(
        self,
        builder: PlanBuilder,
        running: Collection[Request],
        kv: KvManager,
        reserve: int,
        limit: int,
        room: DraftRoom = NO_LIMITS,
    ) -> None:
        """Fill the token budget that a planned step has left with at most `limit` drafts.

        No request waits or is preempted for them. `reserve`: KV blocks that drafts leave free. `room`: the policy's
        limits.
        """
        self._index_budget.begin_step()
        if not self._pricing.begin(builder.step, running, room):
            return
        limit = max(0, min(limit, builder.tokens_left))
        candidates = self._candidates(builder, running, limit) if limit else []
        counts = self._pricing.choose(builder, candidates, limit)
        for candidate, count in zip(candidates, counts, strict=True):
            if count:
                self._verify(builder, candidate, candidate.proposal.token_ids[:count], kv, reserve)

    def _candidates(self, builder: PlanBuilder, running: Iterable[Request], limit: int) -> list[DraftCandidate]:
        pricing, most, found = self._pricing, min(limit, self._max_drafts), list[DraftCandidate]()
        for request in running:
            # The step samples a token in any case. More pending ones are in flight: their successors are unknown.
            if request.pending != 1 or not builder.decodes(request):
                continue
            own = min(most, request.max_len - len(request.tokens) - 1)
            if own <= 0:
                continue
            proposals = self._proposals(request, own) if pricing.considers(request) else ()
            if not proposals:
                pricing.unguessed(request)
                continue
            candidates = [DraftCandidate(request, proposal) for proposal in proposals]
            found.append(candidates[0] if len(candidates) == 1 else max(candidates, key=pricing.expected))
        return found

    def _proposals(self, request: Request, limit: int) -> Sequence[Proposal]:
        if not request.guided:
            return self._guesses(request, limit)
        if self.constraints is None:
            return ()
        return list(self._guided_guesses(request, limit, self.constraints))

    def _guesses(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> list[Proposal]:
        found = []
        for proposer in self.proposers:
            proposal = proposer.propose(request, limit, after)
            if proposal is not None:
                assert 0 < len(proposal.token_ids) <= limit, "a proposer guesses no more than it is asked for"
                found.append(proposal)
        return found

    def _guided_guesses(self, request: Request, limit: int, constraints: Constraints) -> Iterable[Proposal]:
        """Yield the tokens that a guide forces, followed by guesses that it allows."""
        forced = constraints.forced(request.request_id, limit)
        useful = False
        for guesses in self._guesses(request, limit - len(forced), forced) if len(forced) < limit else ():
            legal = constraints.legal(request.request_id, forced + guesses.token_ids)
            if legal > len(forced):
                useful = True
                yield guesses.after(forced, legal)
        legal = 0 if useful or not forced else constraints.legal(request.request_id, forced)
        if legal:
            yield Proposal(FORCED, forced[:legal], (1.0,) * legal, legal)

    def _verify(
        self, builder: PlanBuilder, candidate: DraftCandidate, drafts: tuple[int, ...], kv: KvManager, reserve: int
    ) -> None:
        """Let the request's row verify as many drafts as fit into its blocks and spare ones."""
        request, growth = candidate.request, None
        if request.planned + len(drafts) > request.capacity:
            growth = _grow_if_free(request, request.planned + len(drafts), kv, reserve)
            drafts = drafts[: max(0, request.capacity - request.planned)]
        if drafts:
            builder.set_drafts(request, drafts, growth)
            self._verifying[request.request_id] = candidate

    def ask_head(
        self, builder: PlanBuilder, running: Collection[Request], kv: KvManager, reserve: int, limit: int
    ) -> None:
        """Let the runner's head draft after the rows of a planned step, as far as free blocks hold these tokens.

        `limit`: drafts of all rows, of which the next step cannot verify more.
        """
        if self.head is None or not self._pricing.worthwhile(running):
            return
        wanted, ends = [], []
        for request in running:
            row = builder.row_of(request)
            if row is not None and row.sample and self._pricing.considers(request):
                wanted.append((request, self.head.wanted(request, row)))
                ends.append(row.start + row.count)
        counts = self._pricing.ahead(builder, wanted, limit)
        for (request, _), end, asked in zip(wanted, ends, counts, strict=True):
            growth = _grow_if_free(request, end + asked, kv, reserve) if asked else None
            count = min(asked, request.capacity - end)
            if count > 0:
                builder.set_ahead(request, count, growth)

    def made(self, plan: StepPlan, result: StepResult, requests: Mapping[str, Request]) -> None:
        """Take the drafts of the runner's head, after the requests have got the step's tokens."""
        assert self.head is not None, "the plan asks for no drafts"
        for row, drafts in zip(plan.rows, result.ahead, strict=True):
            request = requests.get(row.request_id)
            if drafts.token_ids and request is not None and request.status is Status.RUNNING:
                self.head.made(request, drafts)

    def stats(self) -> tuple[DraftStats, ...]:
        self.learn()
        return tuple(
            DraftStats(proposer, counts.steps, tuple(counts.drafted), tuple(counts.accepted))
            for proposer, counts in self.counts.items()
        )

    def verified(self, request: Request, row: Row, kept: int) -> tuple[DraftRun, ...]:
        """Take note of a row with drafts, `kept` tokens of which became output (at least 1). Return its drafts.

        `learn` does the rest, which no step has to wait for.
        """
        candidate = self._verifying.pop(request.request_id)
        drafted = len(row.drafts)
        runs = _runs_of(candidate.proposal, drafted)
        self._verified.append(_VerifiedRow(candidate, runs, drafted, kept))
        return runs

    def learn(self) -> None:
        """Learn from the rows that were verified, and the requests that ended, since the last call."""
        if self._verified:
            for candidate, runs, drafted, kept in self._verified:
                self._pricing.verified(candidate, drafted, kept - 1)
                self._count(runs, kept)
            self._verified.clear()
            if self.head is not None and self.head.name in self.counts:
                self.head.review(self.counts[self.head.name])
        for request in self._ended:
            self._pricing.ended(request)
            for proposer in self.proposers:
                proposer.ended(request)
        self._ended.clear()

    def _count(self, runs: tuple[DraftRun, ...], kept: int) -> None:
        """Count the drafts of a row, those of each proposer. The row counts as one of its first draft's proposer."""
        position = 0
        for proposer, tally in accepted_of(runs, kept):
            self.counts.setdefault(proposer, ProposerCounts()).add(tally.drafted, tally.accepted, position)
            position += tally.drafted

    def step_done(self, plan: StepPlan, duration_s: float, device_s: float) -> float:
        """Learn what a step took, and return what its work takes (see `Pricing`)."""
        return self._pricing.step_done(plan, duration_s, device_s)

    def ended(self, request: Request) -> None:
        """Take note of a request that has ended. `learn` does the rest, at once if no step may follow."""
        self._verifying.pop(request.request_id, None)
        self._ended.append(request)
        if not self._verifying:
            self.learn()


def _runs_of(proposal: Proposal, drafted: int) -> tuple[DraftRun, ...]:
    """Return who guessed the first `drafted` drafts of a proposal: a guide those that it forces, then the proposer."""
    if not proposal.forced:
        return (DraftRun(proposal.proposer, drafted),)
    forced = min(proposal.forced, drafted)
    runs = (DraftRun(FORCED, forced), DraftRun(proposal.proposer, drafted - forced))
    return tuple(run for run in runs if run.length)


def _grow_if_free(request: Request, upto: int, kv: KvManager, reserve: int) -> Growth | None:
    """Give a request blocks for `upto` tokens if so many and `reserve` more are free. Return the change, if any."""
    if upto <= request.capacity or not kv.has_room(request.request_id, upto, reserve):
        return None
    growth = kv.grow(request.request_id, upto)
    request.capacity = kv.capacity(request.request_id)
    return growth
