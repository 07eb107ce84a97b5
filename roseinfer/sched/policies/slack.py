"""Slack: each step lasts as long as the most urgent running request can afford, and only what fits is admitted.

A token's due time counts from the request's real first token at its TPOT objective, less a learnt margin, so tokens
ahead of schedule are slack that later steps may spend. From it follow, in each step:

1. demotion: who can no longer keep its objective takes only what is left over;
2. shedding: who can no longer have its first token in time is turned away, unless it has begun;
3. admission, by due time of the first token and cost: while the demand over every horizon fits the machine (`demand`)
   and, if more is asked of the machine than it can do, while the request is cheap enough (`price`);
4. the step's length: the smallest slack. What it leaves beside the decoding rows goes to prompts, and if that is not
   enough, requests that are well ahead sit out this step.

Costs come from a model that is fitted all the time, lengths from an estimator. Requests without objectives never count
in 3 and take what is left over, but age, so that none starves. Without any objectives the plans are those of fifo.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from roseinfer.core.config import SchedulerConfig
from roseinfer.core.events import Admitted, Ended, Event, Queued, StepDone
from roseinfer.core.outputs import COMPLETE
from roseinfer.core.request import Request
from roseinfer.sched.admission import Admission
from roseinfer.sched.backlog import Backlog
from roseinfer.sched.batch import Batch
from roseinfer.sched.cost import CostModel, work_of
from roseinfer.sched.demand import Demand
from roseinfer.sched.ledger import Ledger, Track
from roseinfer.sched.lengths.base import LengthEstimator
from roseinfer.sched.margin import Margin
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.policies.planned import PlannedDecision
from roseinfer.sched.policy import Decision, View, rejectable
from roseinfer.sched.price import PriceLimit
from roseinfer.sched.tenants import TenantShares

SURE_STEPS = 50  # after which the cost model is trusted to call an objective unattainable


@dataclass(frozen=True, slots=True)
class Tuning:
    """`cost_weight`: seconds of due time that a second of work is worth in the order. `roomy`: the utilisation below
    which the price limit does not hold. `reserve`: share of the machine that is kept for requests that are urgent or
    cheap; one of mean work whose first token is due in `patience` TPOT objectives or more leaves all of it free. The
    others are bounds on a step and on waiting.
    """

    cost_weight: float = 4.0
    roomy: float = 0.7
    reserve: float = 0.1
    patience: float = 100.0
    price_window_s: float = 30.0
    price_fill: float = 1.05
    prefill_share: float = 0.35
    longest_step: float = 8.0  # times the smallest TPOT objective
    gap_limit: float = 4.0  # times the request's TPOT objective, between two tokens
    smallest_chunk: int = 16
    guard_steps: float = 6.0
    guard_chunk: int = 256
    ageing_s: float = 10.0  # stands for a TTFT objective
    idle_limit_s: float = 1.0  # of requests that take what is left
    priority_s: float = 1.0  # per level
    fairness_s: float = 1.0  # for a tenant that has twice its share
    refresh_s: float = 0.1
    looked_at: int = 16


class SlackPolicy:
    """What lasts from step to step; `SlackStep` is one step."""

    def __init__(
        self, config: SchedulerConfig, cost: CostModel, lengths: LengthEstimator, tuning: Tuning | None = None
    ) -> None:
        self.tuning = tuning or Tuning()
        self.cost = cost
        self.lengths = lengths
        self.ledger = Ledger()
        self.margin = Margin()
        self.batch = Batch(self.margin.value)
        self.leftover: dict[str, Track] = {}  # decode, but are owed nothing: best effort, or demoted
        self.demand = Demand.of([], [], 0.05)
        self.backlog = Backlog()
        self.price = PriceLimit(self.tuning.price_window_s, self.tuning.price_fill)
        self.tenants = TenantShares()
        self.growth = 0.0  # tokens that the running requests are expected to add
        self.seats = config.max_active_requests or config.max_num_seqs
        self.prompt_rate = 0.0  # prompt tokens a second, over the last one
        self.config = config
        self._fifo = FifoPolicy(config)
        self._promised = 0  # live requests with objectives
        self._unseen: dict[str, Track] = {}  # whose first token is still on its way
        self._refreshed_s = -inf
        self._done, self._done_s = -1, 0.0
        self._planned, self._seconds = -1, 0.0

    # --- what happens -------------------------------------------------------------------------------------------
    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self._step_done(event)
            return
        self._fifo.observe(event)
        track = self.ledger.observe(event)
        assert track is not None, "the ledger knows every live request"
        if isinstance(event, Queued):
            self._queued(track)
        elif isinstance(event, Admitted):
            self.demand = self.demand_with(self.demand, track, track.request.remaining, event.now_s)
            self.growth += track.length
            self.tenants.charge(track.request.tenant, track.work_s, event.now_s)
        else:
            self._ended(track, event)

    def _step_done(self, event: StepDone) -> None:
        self._done, self._done_s = event.plan.step, event.now_s
        if not self._promised and event.plan.step % 4:
            return  # nobody needs to know, but the model should stay true
        work = work_of(event.plan.rows)
        self.cost.observe(work, event.duration_s)
        lasted_s = max(event.duration_s, 1e-6)
        self.prompt_rate += min(1.0, lasted_s) * (work.prompt_tokens / lasted_s - self.prompt_rate)

    def _queued(self, track: Track) -> None:
        request, p = track.request, self.cost.params
        if request.preemptions:
            self._leave(track)
        else:
            self._promised += request.slo is not None
            track.length = self.lengths.total(request)
            track.bound_whole()
        prefill_s = p.token_s * len(track.tokens)
        decode_s = track.length * (p.row_s + p.context_s * (len(track.tokens) + track.length / 2))
        track.work_s = prefill_s + decode_s
        track.weight = (p.row_s + p.context_s * (len(track.tokens) + track.length / 2)) / track.tpot_s
        track.key = request.arrival_s + min(track.ttft_s, self.tuning.ageing_s)
        excess = self.tenants.excess(request.tenant)
        track.key += self.tuning.priority_s * request.priority + self.tuning.fairness_s * excess
        if track.tpot_s < inf:
            # The constant part of a step is paid anyway, so a second of decoding costs more than one of prefill.
            scarce = 1 / max(0.2, 1 - p.step_s / min(track.tpot_s, self._smallest_s))
            track.key += self.tuning.cost_weight * (prefill_s + scarce * decode_s)
            if not request.preemptions:
                self.price.offer(request.arrival_s, track.work_s)
            track.work_s *= 1 + excess
        self.backlog.add(track, self.price.limit_s)
        if track.ttft_s < inf:
            self.backlog.watch(track, track.due_s - prefill_s - p.step_s)

    @property
    def _smallest_s(self) -> float:
        return self.batch.smallest_s if len(self.batch) else inf

    def _ended(self, track: Track, event: Ended) -> None:
        self._promised -= track.request.slo is not None
        self._leave(track)
        if event.reason not in COMPLETE:
            return
        self.lengths.finished(track.request, event.num_outputs)
        if track.tpot_s < inf and event.num_outputs > 1:
            spent_s = event.now_s - track.request.first_token_s
            self.margin.observe(spent_s / (event.num_outputs - 1), track.tpot_s)
            if abs(self.margin.value - self.batch.margin) > 5e-4:
                self.batch.set_margin(self.margin.value)

    def _leave(self, track: Track) -> None:
        """It decodes no longer."""
        name = track.request.request_id
        self.leftover.pop(name, None)
        self._unseen.pop(name, None)
        if track in self.batch:
            self.batch.remove(track)

    # --- a step -------------------------------------------------------------------------------------------------
    def begin(self, view: View) -> Decision:
        if not self._promised:
            return self._fifo.begin(view)
        now_s, in_flight = view.now_s, self._planned > self._done
        if in_flight:  # it begins when the step in flight ends
            now_s = max(now_s, self._done_s + self._seconds)
        self._promote(now_s)
        step = SlackStep(self, view, now_s, in_flight)
        decision = step.decide()
        self._planned, self._seconds = view.step, step.seconds
        return decision

    def _promote(self, now_s: float) -> None:
        for name, track in list(self._unseen.items()):
            if track.request.first_token_s:
                del self._unseen[name]
                if track in self.batch:
                    self.batch.anchor(track, track.request.first_token_s)
        for track in self.ledger.promote():
            name, first_s = track.request.request_id, track.request.first_token_s
            if track.tpot_s == inf or track.doomed or self.unattainable(track):
                track.idle_s = now_s
                self.leftover[name] = track
                continue
            self.batch.add(track, first_s or now_s)
            if not first_s:
                self._unseen[name] = track

    def demote(self, track: Track, now_s: float) -> None:
        self.batch.remove(track)
        track.doomed, track.idle_s = True, now_s
        self.leftover[track.request.request_id] = track

    def refresh_demand(self, now_s: float, slacks: Sequence[float], context: Sequence[int], smallest_s: float) -> None:
        """From the requests that run, now and then; in between, those that start are added."""
        if now_s - self._refreshed_s < self.tuning.refresh_s:
            return
        self._refreshed_s = now_s
        row_s, context_s, tracks = self.cost.params.row_s, self.cost.params.context_s, self.batch.tracks
        left = self.left(context)
        self.growth = sum(left) + sum([track.length for track in self.ledger.filling.values()])
        weights = [
            (row_s + context_s * (n + more / 2)) / track.pace_s
            for track, n, more in zip(tracks, context, left, strict=True)
        ]
        arriving = min(self.tuning.prefill_share, self.cost.params.token_s * self.prompt_rate)
        self.demand = Demand.of(slacks, weights, min(smallest_s, 1.0), arriving)
        for track in self.ledger.filling.values():
            self.demand = self.demand_with(self.demand, track, track.request.remaining, now_s)

    def left(self, context: Sequence[int]) -> list[float]:
        """Tokens that each request of the batch is expected to add."""
        left, pairs = self.lengths.left, zip(self.batch.tracks, context, strict=True)
        return [left(track.request, max(1, n - track.request.prompt_len)) for track, n in pairs]

    def demand_with(self, demand: Demand, track: Track, prompt: int, now_s: float) -> Demand:
        """A request that takes what is left adds nothing."""
        if track.tpot_s == inf:
            return demand
        due_s = min(track.due_s, now_s + self.tuning.ageing_s) - now_s
        return demand.with_one(track.weight, self.cost.params.token_s * prompt, due_s)

    def prefill_s(self, tokens: int) -> float:
        """On a machine that does nothing else."""
        return self.cost.params.step_s + self.cost.params.token_s * tokens

    def unattainable(self, track: Track) -> bool:
        """Whether its TPOT objective is shorter than a step that holds nothing else."""
        p = self.cost.params
        alone_s = p.step_s + p.row_s + p.context_s * len(track.tokens)
        return self.cost.steps >= SURE_STEPS and track.tpot_s < alone_s

    def hopeless(self, view: View, now_s: float) -> list[Track]:
        """Those waiting that even an idle machine could not serve in time any more."""
        found = []
        for track in self.backlog.overdue(now_s):
            if not rejectable(track.request):
                continue
            latest_s = track.due_s - self.prefill_s(view.uncached(track.request))
            if latest_s < now_s and view.can_start(track.request):
                found.append(track)
            elif track.due_s >= now_s:
                self.backlog.watch(track, max(latest_s, now_s))
        return found


class SlackStep:
    """One step. `seconds`: how long it is expected to take."""

    def __init__(self, policy: SlackPolicy, view: View, now_s: float, in_flight: bool) -> None:
        self.seconds = 0.0
        self._policy = policy
        self._tuning = policy.tuning
        self._params = policy.cost.params
        self._view = view
        self._now_s = now_s
        self._in_flight = in_flight
        self._keep = 1 - policy.margin.value

    def decide(self) -> Decision:
        policy, p = self._policy, self._params
        self._measure()
        admission = Admission(policy, self._view, self._now_s)
        admission.run(self._slacks, self._context)
        filling = policy.ledger.filling.values()
        prompts = [*((track, track.request.remaining) for track in filling), *admission.admitted]
        self._rows = list(policy.batch.tracks)
        self._decode_s = p.step_s + p.row_s * len(self._rows) + p.context_s * sum(self._context)
        room = self._room(prompts)
        self._take_turns()
        chunks, starts = self._share(prompts, room)
        self.seconds = self._decode_s + p.token_s * sum(chunks.values())
        rows = [track.request for track in self._rows]
        rows += self._leftovers()
        if not rows and not chunks:  # somebody has to
            rows = [track.request for track in policy.ledger.decoding.values()]
        rows += [track.request for track in filling]
        return PlannedDecision(rows, chunks, starts, list(admission.rejections.values()), self._yields)

    def _measure(self) -> None:
        """Slack of every decoding request; those that are lost are demoted."""
        batch, now_s = self._policy.batch, self._now_s
        self._context = batch.context()
        due = batch.due_in_flight(self._context) if self._in_flight else batch.due(self._context)
        self._slacks = [at_s - now_s for at_s in due]
        if due and min(due) < now_s:
            lost = [track for track, slack in zip(batch.tracks, self._slacks, strict=True) if self._lost(track, slack)]
            for track in lost:
                self._policy.demote(track, now_s)
            if lost:
                self._measure()

    def _lost(self, track: Track, slack: float) -> bool:
        """Whether it stays late even if it decodes in fast steps to its end."""
        late_s = -slack - (track.tpot_s - track.pace_s) * track.outputs  # behind the objective itself
        if late_s <= 0:
            return False
        fast_s = 1.05 * self._params.step_s + 0.5 * self._params.row_s * len(self._policy.batch)
        left = self._policy.lengths.left(track.request, max(1, track.outputs))
        return late_s > max(0.0, left * (track.tpot_s - fast_s))

    # --- what the step holds ------------------------------------------------------------------------------------
    def _room(self, prompts: Sequence[tuple[Track, int]]) -> float:
        """Prompt tokens that fit before the first token is late; makes room by letting requests sit out."""
        policy, token_s = self._policy, self._params.token_s
        if not self._rows:
            self._limit_s = inf
            return float(self._view.token_budget)
        smallest_s = policy.batch.smallest_s
        tau = min(max(min(self._slacks), self._decode_s), self._tuning.longest_step * smallest_s)
        self._limit_s = tau
        room = (tau - self._decode_s) / token_s
        short = sum(left for track, left in prompts if track.request.slo is not None) - room
        over_s = self._decode_s - smallest_s * self._keep
        if short > 0 or over_s > 0:
            room = self._skip(short * token_s, over_s) / token_s
        return room

    def _skip(self, short_s: float, over_s: float) -> float:
        """Leave out those with the most slack, for `short_s` of prompts or because the rows alone take too long.

        Returns the seconds that are left for prompts.
        """
        policy, p, tau, full_s = self._policy, self._params, self._limit_s, self._decode_s
        room_s = tau - full_s
        # One that is ahead by less would soon be the most urgent, and steps would become short and many.
        ahead_s = max(full_s, policy.batch.smallest_s)
        order = sorted(range(len(self._rows)), key=self._slacks.__getitem__)
        tracks, skipped = self._rows, set()
        while order:
            index = order[-1]
            slack = self._slacks[index]
            wanted = short_s > 0 and slack > tau + ahead_s
            too_long = over_s > 0 and slack > 2 * self._decode_s
            if not (wanted or too_long):
                break
            order.pop()
            if not self._may_skip(tracks[index], tau):
                continue
            saved_s = p.row_s + p.context_s * self._context[index]
            skipped.add(index)
            self._decode_s -= saved_s
            short_s -= saved_s
            over_s -= saved_s
            room_s += saved_s
        self._rows = [track for index, track in enumerate(policy.batch.tracks) if index not in skipped]
        return room_s

    def _take_turns(self) -> None:
        """No more decoding rows than the options allow: the most urgent."""
        most = self._policy.config.max_batch_size
        if most is not None and len(self._rows) > most:
            due = {track.request.request_id: track.anchor_s + track.pace_s * len(track.tokens) for track in self._rows}
            self._rows.sort(key=lambda track: due[track.request.request_id])
            del self._rows[most:]

    def _may_skip(self, track: Track, tau: float) -> bool:
        """A reader should not notice: two tokens are never further apart than the gap limit."""
        step = self._view.step
        if track.idle_step != step - 1:
            track.idle_s = self._now_s
        if self._now_s + tau - track.idle_s > self._tuning.gap_limit * track.tpot_s:
            return False
        track.idle_step = step
        return True

    def _share(self, prompts: Sequence[tuple[Track, int]], room: float) -> tuple[dict[str, int], list[Request]]:
        """The step's prompt tokens, in order."""
        config = self._policy.config
        most = config.prefill_max_tokens or self._view.token_budget
        left = int(max(0.0, min(room, most, self._view.token_budget - len(self._rows))))
        if self._rows and left < self._tuning.smallest_chunk:
            left = 0
        if not left and prompts:
            left = min(most, self._guard(*prompts[0]))
        chunks: dict[str, int] = {}
        starts: list[Request] = []
        longest = config.long_prefill_token_threshold or left
        for track, wanted in prompts:
            if left <= 0 or len(starts) >= (config.prefill_max_batch_size or left):
                break
            chunks[track.request.request_id] = min(left, wanted, longest)
            left -= chunks[track.request.request_id]
            if track.request.seat is None:
                starts.append(track.request)
        return chunks, starts

    def _guard(self, track: Track, wanted: int) -> int:
        """Tokens for a prompt for which there is no room, but which is about to be late."""
        left_s = track.due_s - self._now_s
        if left_s < self._tuning.guard_steps * self._decode_s + wanted * self._params.token_s:
            return min(self._tuning.guard_chunk, wanted)
        return 0

    def _leftovers(self) -> list[Request]:
        """Requests that are owed nothing decode while the step stays within its limit, or if they waited long."""
        p, chosen = self._params, []
        for track in self._policy.leftover.values():
            row_s = p.row_s + p.context_s * len(track.tokens)
            if self.seconds + row_s < self._limit_s or self._now_s - track.idle_s > self._tuning.idle_limit_s:
                track.idle_s = self._now_s
                self.seconds += row_s
                chosen.append(track.request)
        return chosen

    def _yields(self, request: Request) -> float:
        """Who gives up its blocks first: those that are owed nothing, then those furthest ahead."""
        track = self._policy.ledger.decoding.get(request.request_id)
        if track is None or track not in self._policy.batch:
            return inf
        return track.anchor_s + track.pace_s * len(track.tokens)
