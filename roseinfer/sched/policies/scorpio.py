"""SCORPIO (arXiv 2505.23022): a TTFT guard and a TPOT guard.

TTFT guard: waiting requests are sorted by deadline. A request is rejected if its remaining time is shorter than the
prefills up to and including its own. TPOT guard: in each decode iteration, a running request earns its relative
proportionality (the smallest running TPOT objective divided by its own), and it decodes when it has earned 1. The sum
of these shares is the virtual batch size. A request is admitted if the mean step time estimated for that size stays
within the smallest TPOT objective.

As published, any admissible prompt makes a step of prompts alone, in which all decoding requests wait (`scorpio_mixed`
mixes them), and credits start at 0 (`scorpio_stagger` spreads them). Requests without a TPOT objective are outside this
scheme and decode in the rest of each step. The paper has no objective for a whole request. With one, the first token is
due early enough for the others on an idle machine, and the request stays outside the scheme: a pace derived from its
expected length rejects more requests than it saves.
"""

from dataclasses import dataclass, field
from math import inf

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import COMPLETE, PolicyStats
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Rejection
from roseinfer.sched.estimates import CostOptions, Estimates, LengthOptions
from roseinfer.sched.policies.common.ledger import MIN_OBJECTIVE_S, RequestStages, Track, latest_first_token_s
from roseinfer.sched.policies.common.planned import CauseUpdates, ExplainedDecision
from roseinfer.sched.policy import Decision, Ended, Event, Queued, RejectedRequest, StepDone, View, rejectable
from roseinfer.sched.registry import register

MIN_CREDIT = 1 - 1e-9  # ten additions of 0.1 stay below 1
STAGGER_SHARE = 0.6180339887  # golden ratio
MIXED_TOKENS = 512  # prompt and decode tokens of a mixed step
MIN_PREFILL_S = 0.022
ALLOWANCE_S = 0.050  # the released code rejects this much earlier than the paper, as a safety margin


@dataclass(slots=True)
class VirtualBatch:
    """The paper's set R: TPOT objectives and context of its requests. `counts`: requests by objective."""

    counts: dict[float, int] = field(default_factory=dict)
    size: int = 0
    context: int = 0

    def add(self, tpot_s: float, context: int) -> None:
        self.counts[tpot_s] = self.counts.get(tpot_s, 0) + 1
        self.size += 1
        self.context += context

    @property
    def smallest(self) -> float:
        return min(self.counts, default=inf)

    @property
    def shares(self) -> float:
        """Virtual batch size: the sum of the requests' proportionalities."""
        counts = self.counts
        return min(counts) * sum([count / tpot_s for tpot_s, count in counts.items()]) if counts else 0.0

    def with_one(self, tpot_s: float, context: int) -> tuple[float, float, float]:
        """Return virtual batch size, mean context and smallest objective after adding a request."""
        smallest = min(self.smallest, tpot_s)
        shares = sum(count * smallest / other for other, count in self.counts.items()) + smallest / tpot_s
        return shares, (self.context + context) / (self.size + 1), smallest


def proportionality(smallest: float, tpot_s: float) -> float:
    return smallest / tpot_s


class ScorpioTrack(Track):
    """Track with the `credit` that it has earned towards its next token. `waits_for`: cause at the last look."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.credit = 0.0
        self.waits_for: Cause | None = None


def earn(tracks: list[ScorpioTrack], smallest: float) -> list[ScorpioTrack]:
    """Run one decode iteration: every track earns, and those that have 1 pay it and are returned."""
    batched = []
    for track in tracks:
        track.credit += proportionality(smallest, track.tpot_s)
        if track.credit >= MIN_CREDIT:
            track.credit -= 1
            batched.append(track)
    return batched


@dataclass(frozen=True, kw_only=True)
class ScorpioOptions(CostOptions, LengthOptions):
    scorpio_eps: float = option(1.3, "inefficiency factor on the estimated step time, 1 or more")
    scorpio_mixed: bool = option(False, "prompts and decoding requests share steps; off: as published")
    scorpio_stagger: bool = option(False, "spread the credits that requests start with; off: as published")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.scorpio_eps < inf:
            raise ConfigError(f"scorpio_eps must be 1 or more, got {self.scorpio_eps}")


# As published, and the best of the same algorithm in steps that mix prompts and decoding requests.
PUBLISHED = {"max_num_batched_tokens": 1024, "scorpio_eps": 1.3}
MIXED = {"scorpio_mixed": True, "scorpio_stagger": True}
TUNED = tuple({**MIXED, "scorpio_eps": eps} for eps in (1.0, 1.1, 1.15, 1.3))


@register("scorpio", options=ScorpioOptions, sheds=True, contenders={"scorpio": (PUBLISHED,), "scorpio-tuned": TUNED})
class ScorpioPolicy:
    def __init__(self, config: SchedulerConfig, options: ScorpioOptions, known: Estimates) -> None:
        self._eps = options.scorpio_eps
        self._mixed = options.scorpio_mixed
        self._stagger = options.scorpio_stagger
        self._seats = config.max_running
        self._cost = known.cost
        self._lengths = known.lengths
        self.ledger = RequestStages(ScorpioTrack)
        self._admitted = 0
        self._batch = VirtualBatch()
        self._named = CauseUpdates()

    def stats(self) -> PolicyStats:
        live, cost = self.ledger.decoding or self.ledger.filling, self._cost
        rows = self._batch.shares if live else 0.0
        return PolicyStats(None, cost.rho, None, None, rows, None, cost.predicted_s)

    def observe(self, event: Event) -> None:
        track = self.ledger.observe(event)
        if track is not None and isinstance(event, Queued) and not track.request.has_run:
            self._bound_whole(track)
        elif isinstance(event, StepDone):
            self._cost.observe(
                self._cost.params.work(event.plan.rows, event.plan.ahead, event.plan.states), event.duration_s
            )
        elif track is not None and isinstance(event, Ended) and event.reason in COMPLETE:
            self._lengths.finished(track.request, event.num_outputs)

    def begin(self, view: View) -> Decision:
        for track in self.ledger.promote():
            track.credit = (self._admitted * STAGGER_SHARE) % 1.0 if self._stagger else 0.0
            self._admitted += 1
        self._batch = batch = VirtualBatch()
        for track in [*self.ledger.decoding.values(), *self.ledger.filling.values()]:
            if track.tpot_s < inf:
                batch.add(track.tpot_s, len(track.tokens))
        rejections, queue = self._guard_ttft(view)
        admitted, stops = self._guard_tpot(view, queue, batch)
        for track in queue[len(admitted) :]:
            track.waits_for = stops
        if rejections and len(admitted) == len(queue):
            rejections = [self._with_attainable(refusal, view, admitted, batch) for refusal in rejections]
        filling = [track for track in self.ledger.filling.values() if track.request not in view.sitting_out]
        if self._mixed or not (filling or admitted):
            decoding = self._decoding(batch)
        else:
            decoding = []
        chunks, starts = self._share(view, len(decoding), filling, admitted)
        rows = [*decoding, *(track.request for track in filling)]
        short = {track.request: Cause.BUDGET for track in admitted if track.request.request_id not in chunks}
        changes = self._named.update(short, stops)
        return ExplainedDecision(rows, chunks, starts, rejections, cause_changes=changes, unnamed_cause=stops)

    def _bound_whole(self, track: ScorpioTrack) -> None:
        """Derive the deadline of the first token from an objective for the whole request."""
        request = track.request
        due_s = latest_first_token_s(track, self._lengths.total(request), self._cost.params)
        track.due_s = min(track.due_s, due_s)
        track.ttft_s = min(track.ttft_s, max(MIN_OBJECTIVE_S, due_s - request.arrival_s))

    # --- TTFT guard ---------------------------------------------------------------------------------------------
    def _guard_ttft(self, view: View) -> tuple[list[RejectedRequest], list[ScorpioTrack]]:
        """Least deadline first; a lower bound of the wait, since running decodes are ignored."""
        rejections, kept, ahead_s = self._without_adapter(view), [], 0.0
        ready = [self.ledger.waiting[each.request_id] for lead in view.waiting() for each in view.members(lead)]
        for track in sorted(ready, key=lambda track: track.due_s):
            own_s = self._prefill_s(track, view.uncached(track.request))
            first_s = max(ahead_s, view.load_s(track.request)) + own_s
            if track.due_s - view.now_s < first_s + ALLOWANCE_S and rejectable(track.request):
                waited = view.now_s - track.request.arrival_s
                cause = _cause_of_miss(track, view, own_s)
                rejection = Rejection(track.first_objective, waited + first_s, cause)
                rejections.append(RejectedRequest(track.request, rejection))
            else:
                ahead_s += own_s
                kept.append(track)
        return rejections, kept

    def _without_adapter(self, view: View) -> list[RejectedRequest]:
        """Reject requests whose adapter comes too late; they are not in `View.waiting`."""
        rejections = []
        for track in self.ledger.waiting.values():
            request = track.request
            if request.loading is Cause.ADAPTER and rejectable(request):
                first_s = view.load_s(request) + self._prefill_s(track, view.uncached(request))
                if track.due_s - view.now_s < first_s + ALLOWANCE_S:
                    waited_s = view.now_s - request.arrival_s
                    rejection = Rejection(track.first_objective, waited_s + first_s, Cause.ADAPTER)
                    rejections.append(RejectedRequest(request, rejection))
        return rejections

    def _with_attainable(
        self, rejected: RejectedRequest, view: View, admitted: list[ScorpioTrack], batch: VirtualBatch
    ) -> RejectedRequest:
        """Add the shortest attainable deadline to a rejection: after the whole queue, if all of it starts in this step.

        The rejection stays as it is if the queue or the request could not start, since the wait is unknown then.
        """
        request, rejection = rejected
        track = self.ledger.waiting[request.request_id]
        held = [len(each.tokens) for each in admitted] + [len(track.tokens)]
        seats = min(view.free_seats, self._seats - len(view.running))
        if len(held) > seats or sum(-(-tokens // view.block_size) for tokens in held) > view.free_blocks:
            return rejected
        alone = batch.size == 0 and not view.running
        if track.tpot_s < inf and not alone and not self._admissible(track, batch):
            return rejected
        started = [(each, each.request.remaining) for each in self.ledger.filling.values()]
        ahead = [*started, *((each, view.uncached(each.request)) for each in admitted)]
        wait_s = max(view.load_s(request), sum(self._prefill_s(each, tokens) for each, tokens in ahead))
        wait_s += self._prefill_s(track, view.uncached(request)) + 2 * ALLOWANCE_S
        first_s = view.now_s - request.arrival_s + wait_s
        if rejection.reason != "ttft":  # add the time that the whole request needs after its first token
            slo = request.slo
            assert slo is not None and slo.e2e_s is not None
            first_s += slo.e2e_s - (track.due_s - request.arrival_s)
        return RejectedRequest(request, rejection._replace(attainable_s=first_s))

    def _prefill_s(self, track: ScorpioTrack, tokens: int) -> float:
        """Return the prefill time of the last `tokens` known tokens."""
        p = self._cost.params
        return max(MIN_PREFILL_S, p.step_s + p.prefill_s(len(track.tokens) - tokens, tokens))

    # --- TPOT guard ---------------------------------------------------------------------------------------------
    def _guard_tpot(
        self, view: View, queue: list[ScorpioTrack], batch: VirtualBatch
    ) -> tuple[list[ScorpioTrack], Cause]:
        """Return the requests that start if the step has tokens for them, and what the first other one lacks."""
        admitted: list[ScorpioTrack] = []
        seats = min(view.free_seats, self._seats - len(view.running))
        free_blocks = view.free_blocks
        for track in queue:
            blocks = -(-len(track.tokens) // view.block_size)
            if len(admitted) >= seats:
                return admitted, view.seat_cause
            if blocks > free_blocks:
                return admitted, Cause.BLOCKS
            if track.tpot_s < inf:
                alone = batch.size == 0 and not view.running
                if not alone and not self._admissible(track, batch):
                    return admitted, Cause.UTILISATION
                batch.add(track.tpot_s, len(track.tokens))
            free_blocks -= blocks
            admitted.append(track)
        return admitted, Cause.BUDGET

    def _admissible(self, track: ScorpioTrack, batch: VirtualBatch) -> bool:
        rows, context, smallest = batch.with_one(track.tpot_s, len(track.tokens))
        return self.estimate(rows, context, self._lengths.total(track.request)) <= smallest

    def estimate(self, rows: float, context: float, length: float) -> float:
        """Mean step time over the next `length` steps: the analytic model of the paper, times its inefficiency."""
        p = self._cost.params
        linear_s = p.context_s * rows * p.reads.of(context + length / 2) + p.row_s * rows + p.step_s
        return self._eps * (linear_s + p.experts_s(rows))

    def _decoding(self, batch: VirtualBatch) -> list[Request]:
        tracks = list(self.ledger.decoding.values())
        bound = [track for track in tracks if track.tpot_s < inf]
        smallest = min((track.tpot_s for track in bound), default=inf)
        chosen = earn(bound, min(smallest, batch.smallest))
        free = [track for track in tracks if track.tpot_s == inf]
        return [track.request for track in chosen + free]

    # --- tokens -------------------------------------------------------------------------------------------------
    def _share(
        self, view: View, decoding: int, filling: list[ScorpioTrack], admitted: list[ScorpioTrack]
    ) -> tuple[dict[str, int], list[Request]]:
        """Prompt tokens for those that run, then for those admitted, by deadline."""
        budget = min(MIXED_TOKENS, view.token_budget) if self._mixed else view.token_budget
        left = max(1, budget - decoding)
        chunks, starts = {}, []
        for track in [*filling, *admitted]:
            running = track.request.request_id in self.ledger.filling
            if left > 0 or running:
                wanted = track.request.remaining if running else view.uncached(track.request)
                chunks[track.request.request_id] = min(wanted, left)
                left -= chunks[track.request.request_id]
                if not running:
                    starts.append(track.request)
        return chunks, starts


def _cause_of_miss(track: ScorpioTrack, view: View, own_s: float) -> Cause:
    """Return why a request with a prompt of `own_s` seconds is too late.

    It is the last cause of its wait. A request that has just arrived was delayed by earlier prompts, the running step
    or its transit. IDLE means that even an idle machine would be too slow.
    """
    if own_s + ALLOWANCE_S > track.ttft_s:
        return Cause.IDLE
    if track.waits_for is not None:
        return track.waits_for
    if track.due_s - view.now_s >= own_s + ALLOWANCE_S:
        return Cause.QUEUE
    return Cause.STEP if view.running else Cause.TRANSIT
