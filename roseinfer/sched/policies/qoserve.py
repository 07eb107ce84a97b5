"""QoServe: prompt chunks are as long as the most urgent decoding request allows, and late prompts go last.

Order: arrival + TTFT objective + c * prompt tokens left, where c is 8 ms under load and 1 ms without. Prompts that can
no longer be in time come after all others. No request is rejected, and every running request decodes in each step.
After QoServe/Niyama (ASPLOS 2026). Token deadlines count from the real first token, and are 5% earlier than promised.

A request with an objective for the whole request must have its first token early enough for the expected others. Their
pace follows from the deadline, and is set again when there are more tokens than expected.
"""

from dataclasses import dataclass
from math import inf
from operator import itemgetter

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import COMPLETE, PolicyStats
from roseinfer.core.request import Status
from roseinfer.core.slo import Cause
from roseinfer.sched.estimates import CostOptions, Estimates, LengthOptions
from roseinfer.sched.policies.common.ledger import (
    RequestStages,
    Track,
    e2e_pace_s,
    latest_first_token_s,
)
from roseinfer.sched.policies.common.planned import ExplainedDecision
from roseinfer.sched.policy import Decision, Ended, Event, Queued, StepDone, View
from roseinfer.sched.registry import register

MARGIN_SHARE = 0.05
MAX_CHUNK_TOKENS = 2500
LOADED_S = 0.25  # queued prefill that counts as load
WEIGHT_LOADED_S, WEIGHT_LIGHT_S = 8e-3, 1e-3  # per prompt token
MIN_PACE_STEPS = 2.0  # steps of an idle machine: no prompt waits for a deadline that needs a faster pace
AGEING_S = 10.0  # in place of a TTFT objective


@dataclass(frozen=True, kw_only=True)
class QoServeOptions(CostOptions, LengthOptions):
    """Options of `qoserve`. Expected lengths only matter for objectives of whole requests."""


@register("qoserve", options=QoServeOptions)
class QoServePolicy:
    def __init__(self, config: SchedulerConfig, options: QoServeOptions, known: Estimates) -> None:
        self._cost = known.cost
        self._lengths = known.lengths
        self.ledger = RequestStages(Track)
        self._paced: dict[str, float] = {}  # request -> outputs after which its pace is set again
        self._batch: dict[str, Track] = {}  # decoding, with token deadlines
        self._first_token_in_flight: list[Track] = []  # decoding, but their first token is still in flight
        self._seats = config.max_running
        self._budget_s = inf
        self._late = 0  # number of prompts that can no longer be in time

    def stats(self) -> PolicyStats:
        ledger = self.ledger
        return PolicyStats(
            speed=self._cost.rho,
            margin=MARGIN_SHARE,
            step_budget_s=self._budget_s if ledger.decoding and self._budget_s < inf else None,
            demoted=self._late if ledger.waiting or ledger.filling else 0,
            predicted_step_s=self._cost.predicted_s,
        )

    def observe(self, event: Event) -> None:
        track = self.ledger.observe(event)
        if track is not None:
            self._paced.pop(track.request.request_id, None)
            self._batch.pop(track.request.request_id, None)  # it has ended or was preempted
            if isinstance(event, Queued):
                length = self._lengths.total(track.request)
                track.due_s = min(track.due_s, latest_first_token_s(track, length, self._cost.params))
            elif isinstance(event, Ended) and event.reason in COMPLETE:
                self._lengths.finished(track.request, event.num_outputs)
        if isinstance(event, StepDone):
            self._cost.observe(
                self._cost.params.work(event.plan.rows, event.plan.ahead, event.plan.states), event.duration_s
            )

    def begin(self, view: View) -> Decision:
        self._promote()
        self._pace(view.now_s)
        decoding = list(self.ledger.decoding.values())
        tokens, spare_s = self._room(view, decoding)
        params, beside = self._cost.params, len(decoding)
        chunks, starts, free_blocks = {}, [], view.free_blocks
        seats = min(view.free_seats, self._seats - len(view.running))
        lacking: Cause | None = None  # what the first request that could start lacks
        for track, left in self._order(view) if tokens > 0 and spare_s > 0 else ():
            start = len(track.tokens) - left
            chunk = min(left, tokens)
            if spare_s < inf:
                chunk = min(chunk, int(params.prefill_tokens(start, spare_s, beside)))
            if chunk <= 0:
                break
            request = track.request
            if request.request_id in self.ledger.waiting:
                blocks = -(-len(track.tokens) // view.block_size)
                if seats <= 0 or blocks > free_blocks:
                    lacking = lacking or (view.seat_cause if seats <= 0 else Cause.BLOCKS)
                    continue
                seats -= 1
                free_blocks -= blocks
                starts.append(request)
            chunks[request.request_id] = chunk
            tokens -= chunk
            spare_s -= params.prefill_s(start, chunk, beside)
            beside += chunk
        filling = [track.request for track in self.ledger.filling.values()]
        rows = [*(track.request for track in decoding), *filling]
        default_cause = lacking or (Cause.BUDGET if tokens <= 0 else Cause.UTILISATION)
        return ExplainedDecision(rows, chunks, starts, cause_changes=(), unnamed_cause=default_cause)

    def _promote(self) -> None:
        """Let token deadlines count from the real first token."""
        decoding = self.ledger.decoding
        for track in [*self._first_token_in_flight, *self.ledger.promote()]:
            request = track.request
            if not request.first_token_s or request.request_id not in decoding:
                continue
            if track.end_s < inf:
                self._paced[request.request_id] = 0.0
            elif track.tpot_s < inf:
                track.set_pace(MARGIN_SHARE, request.first_token_s, request.prompt_len)
                self._batch[request.request_id] = track
        self._first_token_in_flight = [track for track in decoding.values() if not track.request.first_token_s]

    def _pace(self, now_s: float) -> None:
        """Set the pace of requests with a deadline, when they begin to decode and when they exceed the expected length.

        A request that needs a token in nearly every step of an idle machine delays no others: prompts would stop.
        """
        for name, until in self._paced.items():
            track = self.ledger.decoding[name]
            outputs = track.request.num_outputs
            if outputs < until:
                continue
            left = max(1.0, self._lengths.left(track.request, max(1, outputs)))
            self._paced[name] = outputs + left
            self._batch.pop(name, None)
            track.tpot_s = min(track.slo.tpot_s or inf, e2e_pace_s(track, now_s, left))
            if track.tpot_s > MIN_PACE_STEPS * self._cost.params.step_s:
                track.set_pace(MARGIN_SHARE, now_s, len(track.tokens) - 1)
                self._batch[name] = track

    def _room(self, view: View, decoding: list[Track]) -> tuple[int, float]:
        """Return the most prompt tokens, and the seconds that they may take before a decoding request is late."""
        limit = min(MAX_CHUNK_TOKENS, view.token_budget - len(decoding))
        slack = min([track.next_due_s for track in self._batch.values()], default=inf) - view.now_s
        self._budget_s = slack
        if slack == inf:
            return limit, inf
        params = self._cost.params
        decode_s = params.rows_s(len(decoding), params.reads.of(*[len(track.tokens) for track in decoding]))
        spare = slack - decode_s
        self._budget_s = max(slack, decode_s)
        return limit, spare

    def _order(self, view: View) -> list[tuple[Track, int]]:
        """Return the prompts that run or could start, the most urgent first, each with its tokens left."""
        params = self._cost.params
        found = [(track, track.request.remaining) for track in self.ledger.filling.values()]
        for lead in view.waiting():
            found += [(self.ledger.waiting[each.request_id], view.uncached(each)) for each in view.members(lead)]
        token_s, pair_s, before_s = params.token_s, params.pair_s, params.chunk_context_s
        state_tokens = params.reads.state_tokens
        # `CostParams.prefill_s`, inlined: the last `left` of n tokens attend to (2 n - left + 1) / 2 each on average.
        # Windows are ignored. A model with experts reads all of them in a step full of prompts.
        prefill_s = [
            left * (token_s + 0.5 * pair_s * (2 * n - left + 1)) + before_s * (n - left + state_tokens)
            for n, left in [(len(track.tokens), left) for track, left in found]
        ]
        queued_s, constant_s = sum(prefill_s), params.step_s + params.experts_s(inf)
        weight = WEIGHT_LOADED_S if queued_s > LOADED_S else WEIGHT_LIGHT_S

        in_time: list[tuple[float, Track, int]] = []
        late: list[tuple[float, Track, int]] = []
        for (track, left), own_s in zip(found, prefill_s, strict=True):
            due_s = track.due_s if track.due_s < inf else track.request.arrival_s + AGEING_S
            load_s = 0.0 if track.request.status is Status.RUNNING else view.load_s(track.request)
            missed = view.now_s + load_s + constant_s + own_s > due_s
            (late if missed else in_time).append((due_s + weight * left, track, left))
        self._late = sum(track.due_s < inf for _, track, _ in late)
        by_key = itemgetter(0)
        return [(track, left) for _, track, left in sorted(in_time, key=by_key) + sorted(late, key=by_key)]
