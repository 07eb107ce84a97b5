"""Marginal pricing: each draft's chance is compared with what it adds to the step.

Guesses are taken in the order of chance per second while they raise the step's tokens per second. The step's own rows
count at the speed of a step without drafts and prompts. `docs/explanation/drafts.md` has the reasons.

A head makes its drafts a step before they are verified. It is asked for as many as are expected to pay for both.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from roseinfer.core.config.speculation import MAX_DRAFTS
from roseinfer.core.plan import StepPlan
from roseinfer.core.request import Request
from roseinfer.sched.cost.drafts import features
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.drafting.chances import ChanceTable, DepthChances, RequestChances, chances, learn, share_at
from roseinfer.sched.drafting.head import NAMES as HEADS
from roseinfer.sched.drafting.pricing import DraftCandidate
from roseinfer.sched.drafting.probes import Probes
from roseinfer.sched.drafting.yields import KNOWN_STEPS_COUNT, DraftYields
from roseinfer.sched.estimates import CostOptions, Estimates
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import DraftRoom

MIN_GAIN_RATIO = 1.1  # of tokens per second with drafts to those without, for the first step with drafts
MIN_TRUSTED_STEPS = 8  # observed steps without drafts, before anything is compared with them
MAX_DRAFTED_STEPS = 64  # in a row, before one without drafts shows whether the machine's speed has changed
MAX_PLANNED_DRAFTED_STEPS = 16  # the same, while the policy counts on drafts, and so on what it would lose without
MAX_EARLY_DRAFTED_STEPS = 3  # the same, until this many steps without drafts are known
MIN_CHANCE_SHARE = 0.02  # of a guess with those before it
_MAX_EMPTY_STEPS = 2  # without a right draft, before a request pauses
_MIN_FIRST_CHANCE_SHARE = 0.4  # of its first guess, with which it does not pause
_MAX_PAUSE_STEPS = 256
MIN_DRAFTED_STEPS = 8  # observed, before others learn what rows can expect
MIN_ROWS_COUNT = 4  # of a step that shows what rows can expect
_EXPOSED_GAIN_SHARE = 0.1
_MAX_SAMPLED_COUNT = 8  # guesses that are verified although they do not pay, when drafting is tried again
_LEAST_S = 1e-12  # of a draft, so that free ones can be ordered
_DEPTH_GAIN_SHARE, _OWN_DEPTH_GAIN_SHARE = 1 / 64, 1 / 12  # of a chain, for the head's chances in all, in a request


class _Record:
    """Record of one request. `empty`: steps without a right draft, one after the other. It gets no drafts before the
    step `resume`. `steps`, `tokens`, `drafts`: of those that count for its yield. `depths`: of a head's drafts.
    `gains`: see `DraftYields`.
    """

    __slots__ = ("by_proposer", "depths", "drafts", "empty", "gains", "pause", "resume", "steps", "tokens")

    def __init__(self) -> None:
        self.by_proposer: dict[str, RequestChances] = {}
        self.depths: DepthChances | None = None
        self.empty = self.resume = 0
        self.pause = 1
        self.steps = self.tokens = self.drafts = 0
        self.gains: Sequence[float] = ()

    def count(self, tokens: int, drafts: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.drafts += drafts


class _Guess(NamedTuple):
    """One guess: number of its candidate, its chance with all before it, and what it costs beyond the tokens' price.

    `order`: guesses are taken by it, the least first. `depth`: how many draft steps of the head make it, if they are
    still to be paid.
    """

    order: float
    candidate: int
    chance: float
    context_s: float
    depth: int = 0


# The named tuple's own __new__ would double the cost, and each step makes one for every guess.
_new_guess: Callable[[tuple[float, int, float, float, int]], _Guess] = partial(tuple.__new__, _Guess)


class _Chain(NamedTuple):
    """Drafts that a head may make for one request: its `number`, at most `most`. `context`: tokens before them.

    `shares`: as of its `DepthChances`. `chance`: of the last draft that was taken, with all before it.
    """

    number: int
    shares: Sequence[float]
    most: int
    context: int
    chance: float = 1.0


class MarginalPricing:
    """Pricing by chance and marginal cost.

    `cost`: the policy's model. `learns`: nothing else feeds it, so each step is fed here. `overlap`: two steps
    are in flight without drafting, so it exposes the host's work. `yields`: learns from requests that end.
    """

    def __init__(self, cost: CostModel, yields: DraftYields, *, learns: bool = False, overlap: bool = False) -> None:
        self._cost = cost
        self._yields = yields
        yields.enabled = True
        self._learns = learns
        self._overlap = overlap
        self._table = ChanceTable()
        self._records: dict[str, _Record] = {}
        self._probes = Probes()
        self._step = 0
        self._room = DraftRoom()
        self._running = 0
        self._on = False  # when the last step was planned
        self._drafted_steps = 0  # in a row
        self._unguessed: list[Sequence[float]] = []  # last gains of the step's rows without guesses
        self._exposed_s = 0.0
        self._depths = DepthChances(_DEPTH_GAIN_SHARE)  # learns from one request in a step
        self._plain = False  # whether the step that is planned has to show what it takes without drafts
        self._spent_s = 0.0  # for the drafts that it verifies
        self._head_s = 0.0  # of the step before, to make the drafts of this one
        self._declined = False  # whether no draft of the head was worth that

    @classmethod
    def for_policy(cls, options: object, known: Estimates, *, offloads: bool, overlap: bool) -> "MarginalPricing":
        """Return the pricing for a policy with these `options`, which feeds `known` itself if it predicts step times;
        otherwise the K/V offload does if there is one (`offloads`).
        """
        learns = not (offloads or isinstance(options, CostOptions))
        return cls(known.cost, known.yields, learns=learns, overlap=overlap)

    # --- the switch ---------------------------------------------------------------------------------------------
    def worthwhile(self, running: Collection[Request]) -> bool:
        return bool(running) and (self._probes.on or bool(self._room.first) or self._room.planned)

    def begin(self, step: int, running: Collection[Request], room: DraftRoom) -> bool:
        on = self._on = self.worthwhile(running)
        self._step, self._running, self._room = step, len(running), room
        self._unguessed = []
        self._plain, self._spent_s = False, 0.0
        if not on:
            self._head_s, self._declined = 0.0, False
            self._probes.skip(step, self._running)
            return False
        most = MAX_PLANNED_DRAFTED_STEPS if room.planned else MAX_DRAFTED_STEPS
        if self._cost.steps < KNOWN_STEPS_COUNT:
            most = MAX_EARLY_DRAFTED_STEPS
        if self._cost.steps < MIN_TRUSTED_STEPS or self._drafted_steps >= most:
            self._drafted_steps = 0
            self._plain = True
            return False
        return True

    def considers(self, request: Request) -> bool:
        record = self._records.get(request.request_id)
        waits = record is not None and record.resume > self._step
        return not waits or self._room.planned or request.request_id in self._room.first

    def expected(self, candidate: DraftCandidate) -> float:
        return sum(self._chances(candidate))

    # --- the choice ---------------------------------------------------------------------------------------------
    def choose(self, builder: PlanBuilder, candidates: Sequence[DraftCandidate], limit: int) -> Sequence[int]:
        found = [self._chances(candidate) for candidate in candidates]
        work = self._cost.params.work(builder.rows)
        self._expect(candidates, found, work.prompt_tokens)
        counts, saved_s = [0] * len(candidates), -self._head_s
        if candidates:
            saved_s += self._fill(counts, work, candidates, found, limit)
        drafted = any(counts)
        if not drafted and self._probes.untried:
            self._sample(counts, candidates, limit)
        self._drafted_steps = self._drafted_steps + 1 if drafted else 0
        exposed_s = self._exposed_s if self._overlap and not drafted else 0.0  # else part of the drafts' cost
        self._probes.record(
            self._step,
            self._running,
            saved_s,
            exposed_s,
            guessed=bool(candidates),
            drafted=drafted,
            declined=self._declined,
        )
        for candidate, count in zip(candidates, counts, strict=True):
            if not count and candidate.request.request_id in self._room.first:
                self.unguessed(candidate.request)
        return counts

    def _fill(
        self,
        counts: list[int],
        work: Work,
        candidates: Sequence[DraftCandidate],
        found: Sequence[Sequence[float]],
        limit: int,
    ) -> float:
        """Set the counts of drafts, whose chances are `found`. Return the seconds that they will probably save."""
        basket = _Basket(self._cost.params, work, limit)
        first, rest = self._room.first, list[_Guess]()
        needy = [index for index, each in enumerate(candidates) if each.request.request_id in first] if first else []
        for index in needy:
            basket.take_for_one(self._guesses(index, candidates[index], found[index], 0.0), counts)
        each_s = basket.each_s
        for index, (candidate, own) in enumerate(zip(candidates, found, strict=True)):
            if index not in needy:
                rest += self._guesses(index, candidate, own, each_s)
        seen = self._step % len(candidates)
        if candidates[seen].proposal.proposer in HEADS:
            self._depths.add(found[seen])
        rest.sort()
        least = 1.0 if self._drafted_steps or self._room.planned else MIN_GAIN_RATIO
        basket.take_best(rest, counts, self._room.seconds, least, verifies=self._room.planned)
        self._spent_s = basket.spent_s
        return basket.saved_s

    def _expect(
        self, candidates: Sequence[DraftCandidate], found: Sequence[Sequence[float]], prompt_tokens: int
    ) -> None:
        """Let the policy know what the step's rows can expect of drafts, whose chances are `found`."""
        if self._cost.draft_steps < MIN_DRAFTED_STEPS:
            return
        rows = [list(accumulate(own)) for own in found]
        for candidate, gains in zip(candidates, rows, strict=True):
            self._record_of(candidate.request).gains = gains
        if len(rows) + len(self._unguessed) >= MIN_ROWS_COUNT:
            self._yields.expect([*rows, *self._unguessed], prompt_tokens)

    def _sample(self, counts: list[int], candidates: Sequence[DraftCandidate], limit: int) -> None:
        """Set the counts of a few first guesses, which show what they cost and how often they are right.

        They need no room: under load it would never be known that drafts make some.
        """
        for number in range(min(limit, len(candidates), _MAX_SAMPLED_COUNT)):
            counts[number] = 1

    def _guesses(self, index: int, candidate: DraftCandidate, found: Sequence[float], each_s: float) -> list[_Guess]:
        """Return the guesses of candidate `index`, with their chances. `each_s`: what a token costs."""
        context_s = self._cost.params.draft_cost.draft_context_s * len(candidate.request.tokens)
        if candidate.proposal.proposer in HEADS:
            self._depths_of(candidate.request).add(found)
        price_s = -max(each_s + context_s, _LEAST_S)
        return [_new_guess((c / price_s, index, c, context_s, 0)) for c in found if c >= MIN_CHANCE_SHARE]

    def _chances(self, candidate: DraftCandidate) -> Sequence[float]:
        record = self._records.get(candidate.request.request_id)
        own = None if record is None else record.by_proposer.get(candidate.proposal.proposer)
        return chances(self._table, own, candidate.proposal)

    # --- drafts of a head -----------------------------------------------------------------------------------------
    def ahead(self, builder: PlanBuilder, wanted: Sequence[tuple[Request, int]], limit: int) -> Sequence[int]:
        counts = [0] * len(wanted)
        self._head_s, self._declined = 0.0, False
        if self._plain or not any(most for _, most in wanted):
            return counts
        costs = self._cost.params.draft_cost
        self._fill_ahead(counts, builder, wanted, limit)
        if not any(counts) and self._probes.untried and costs.head_step_s <= self._room.seconds:
            for number in [number for number, (_, most) in enumerate(wanted) if most][: min(limit, _MAX_SAMPLED_COUNT)]:
                counts[number] = 1
        self._declined = not any(counts)
        self._head_s = costs.head_s(max(counts), sum(counts))
        return counts

    def _fill_ahead(
        self, counts: list[int], builder: PlanBuilder, wanted: Sequence[tuple[Request, int]], limit: int
    ) -> None:
        """Set the counts of drafts that will probably pay, in the next step, for being made and verified.

        Requests that need several tokens per step come first. Then one draft more of each request that has a likely one
        is taken together, as often as that raises the rate.
        """
        params, room_s = self._cost.params, self._room.seconds - self._spent_s
        sampling = [row.start + row.count for row in builder.rows if row.sample]
        basket = _Basket(params, Work(decode_rows=len(sampling), decode_context=params.reads.of(*sampling)), limit)
        chains = []
        for index, (request, most) in enumerate(wanted):
            if request.request_id in self._room.first:
                basket.take_for_one(self._guesses_ahead(params, index, request, most), counts)
            elif most:
                chains.append(_Chain(index, self._depths_of(request).shares, most, len(request.tokens)))
        basket.take_depths(chains, counts, room_s, 1.0 if self._drafted_steps else MIN_GAIN_RATIO)

    def _guesses_ahead(self, params: CostParams, index: int, request: Request, most: int) -> list[_Guess]:
        context_s = params.draft_cost.draft_context_s * len(request.tokens)
        products = enumerate(self._depths_of(request).products(most), 1)
        return [_Guess(0.0, index, c, context_s, depth) for depth, c in products if c >= MIN_CHANCE_SHARE]

    def _depths_of(self, request: Request) -> DepthChances:
        record = self._record_of(request)
        if record.depths is None:
            record.depths = DepthChances(_OWN_DEPTH_GAIN_SHARE, self._depths.shares)
        return record.depths

    # --- learning -----------------------------------------------------------------------------------------------
    def unguessed(self, request: Request) -> None:
        record = self._record_of(request)
        record.count(1, 0)
        self._unguessed.append(record.gains if record.resume > self._step else ())

    def verified(self, candidate: DraftCandidate, drafted: int, accepted: int) -> None:
        record, proposal = self._record_of(candidate.request), candidate.proposal
        own = record.by_proposer.setdefault(proposal.proposer, RequestChances())
        learn(self._table, own, proposal, drafted, accepted)
        record.count(accepted + 1, drafted)
        if accepted:
            record.empty, record.pause = 0, 1
            return
        record.empty += 1
        if record.empty >= _MAX_EMPTY_STEPS and self._chances(candidate)[0] < _MIN_FIRST_CHANCE_SHARE:
            record.resume = self._step + 1 + record.pause
            record.pause = min(2 * record.pause, _MAX_PAUSE_STEPS)

    def step_done(self, plan: StepPlan, duration_s: float, device_s: float) -> float:
        if self._overlap and self._on and device_s > 0:
            self._exposed_s += _EXPOSED_GAIN_SHARE * (max(0.0, duration_s - device_s) - self._exposed_s)
            if not plan.num_drafts:
                duration_s = device_s
        if self._learns and plan.rows:
            self._cost.observe(self._cost.params.work(plan.rows, plan.ahead, plan.states), duration_s)
        return duration_s

    def ended(self, request: Request) -> None:
        record = self._records.pop(request.request_id, None)
        if record is not None:
            self._yields.add(request.tenant, record.steps, record.tokens, record.drafts)

    def _record_of(self, request: Request) -> _Record:
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = _Record()
        return record


class _Basket:
    """Drafts taken so far for a step. `each_s`: what the next token costs. `gain`: tokens that they will probably be.

    `saved_s`: seconds in which as many tokens would come without drafts, less what the drafts cost.
    """

    def __init__(self, params: CostParams, work: Work, limit: int) -> None:
        self._params = params
        self._costs = params.draft_cost
        self._tokens = work.prompt_tokens + work.decode_rows
        self._left = limit
        self._rows = work.decode_rows
        self._alone_s = params.rows_s(work.decode_rows, work.decode_context)
        self._taken = self._depth = 0
        self.gain = self.spent_s = 0.0

    @property
    def each_s(self) -> float:
        return self._costs.one_more_s(self._tokens) + self._params.experts_s(1, self._tokens)

    @property
    def saved_s(self) -> float:
        return self.gain * self._alone_s / max(1, self._rows) - self.spent_s

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return (self._rows + self.gain) / (self._alone_s + self.spent_s)

    def price_s(self, guess: _Guess) -> float:
        price_s = self.each_s + guess.context_s + (0.0 if self._taken else self._costs.verify_s)
        if not guess.depth:
            return price_s
        return price_s + self._costs.head_s(max(0, guess.depth - self._depth), 1)

    def take_for_one(self, guesses: Sequence[_Guess], counts: list[int]) -> None:
        """Take guesses of a request that needs them while they raise its own tokens per second."""
        own = 1.0
        for guess in guesses:
            price_s = self.price_s(guess)
            if self._left <= 0 or guess.chance * (self._alone_s + self.spent_s) < own * price_s:
                return
            self._take(guess, price_s)
            own += guess.chance
            counts[guess.candidate] += 1

    def take_best(
        self, guesses: Sequence[_Guess], counts: list[int], room_s: float, least: float, *, verifies: bool = False
    ) -> None:
        """Take the first of the ordered `guesses`, as many as give the step the most tokens per second.

        They may take `room_s` seconds, and must give `least` times what it has without them. `verifies`: that a step
        has drafts is decided, so it is what it has if it verifies none that counts.
        """
        rows, alone_s, costs, experts_s = self._rows, self._alone_s, self._costs, self._params.experts_s
        tokens, left, gain, spent_s = self._tokens, self._left, self.gain, self.spent_s
        verify_s = 0.0 if self._taken else costs.verify_s
        best, taken = least * (rows + gain) / (alone_s + spent_s + verifies * verify_s), 0
        for number, guess in enumerate(guesses[:left], 1):
            spent_s += costs.one_more_s(tokens) + experts_s(1, tokens) + guess.context_s + verify_s
            if spent_s > room_s:
                break
            verify_s = 0.0
            tokens += 1
            gain += guess.chance
            rate = (rows + gain) / (alone_s + spent_s)
            if rate > best:
                best, taken, self.gain, self.spent_s = rate, number, gain, spent_s
        self._tokens += taken
        self._left -= taken
        self._taken += taken
        for guess in guesses[:taken]:
            counts[guess.candidate] += 1

    def take_depths(self, chains: Sequence[_Chain], counts: list[int], room_s: float, least: float) -> None:
        """Take one draft more of each likely chain, as often as the step has more tokens per second with them.

        Arguments as for `take_best`. What all of them cost is computed at once.
        """
        best, taken, levels = least * self.rate, 0, list[list[int]]()
        worth = self.rate * (self.each_s + self._costs.head_draft_s)  # of a draft that pays for itself
        gain, drafts, context = self.gain, 0, 0
        while chains and len(levels) < MAX_DRAFTS:
            chains = _one_deeper(chains, len(levels), worth)
            if drafts + len(chains) > self._left:
                chains = sorted(chains, key=lambda chain: -chain.chance)[: self._left - drafts]
            levels.append([chain.number for chain in chains])
            gain += sum([chain.chance for chain in chains])
            context += sum([chain.context for chain in chains])
            drafts += len(chains)
            spent_s = self.spent_s + self._drafts_s(drafts, context, len(levels))
            if not chains or spent_s > room_s:
                break
            rate = (self._rows + gain) / (self._alone_s + spent_s)
            if rate > best:
                best, taken = rate, len(levels)
        for level in levels[:taken]:
            for number in level:
                counts[number] += 1

    def _drafts_s(self, drafts: int, context: int, depth: int) -> float:
        """Return what these drafts take when they are made and verified, beyond the drafts that were taken before."""
        found = features(self._tokens, drafts, context, max(0, depth - self._depth), drafts)
        if self._taken:
            found = (0.0, *found[1:])
        return self._costs.seconds(found) + self._params.experts_s(drafts, self._tokens)

    def _take(self, guess: _Guess, price_s: float) -> None:
        self.gain += guess.chance
        self.spent_s += price_s
        self._tokens += 1
        self._left -= 1
        self._taken += 1
        self._depth = max(self._depth, guess.depth)


def _one_deeper(chains: Sequence[_Chain], depth: int, worth: float) -> list[_Chain]:
    """Return the chains whose draft at this depth, counted from 0, has at least the chance `worth`."""
    found = []
    for number, shares, most, context, chance in chains:
        if depth < most:
            chance *= share_at(shares, depth)
            if chance >= worth:
                found.append(_Chain(number, shares, most, context, chance))
    return found
