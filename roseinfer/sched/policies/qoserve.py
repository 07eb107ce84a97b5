"""QoServe-like: prompt chunks as long as the most urgent decoding request allows, and late prompts go last.

Order: arrival + TTFT objective + c * prompt tokens left, c = 8 ms under load and 1 ms without. Prompts that can no
longer be in time queue behind all others. Nobody is turned away, and every running request decodes in each step.
After QoServe/Niyama (ASPLOS 2026); token deadlines count from the real first token, brought forward by 5%.
"""

from math import inf
from operator import itemgetter

from roseinfer.core.config import SchedulerConfig
from roseinfer.core.events import Event, StepDone
from roseinfer.core.outputs import PolicyStats
from roseinfer.sched.cost import Work, work_of
from roseinfer.sched.estimates import CostOptions, Estimates
from roseinfer.sched.ledger import Batch, Ledger, Track
from roseinfer.sched.planned import PlannedDecision
from roseinfer.sched.policy import Decision, View
from roseinfer.sched.registry import register

MARGIN = 0.05
LONGEST_CHUNK = 2500
LOADED_S = 0.25  # seconds of queued prefill
WEIGHT_LOADED_S, WEIGHT_LIGHT_S = 8e-3, 1e-3  # per prompt token
AGEING_S = 10.0  # in place of a TTFT objective


@register("qoserve", options=CostOptions)
class QoServePolicy:
    def __init__(self, config: SchedulerConfig, options: CostOptions, known: Estimates) -> None:
        self._cost = known.cost
        self._ledger = Ledger()
        self._batch = Batch(MARGIN)
        self._unseen: list[Track] = []  # decode, and their first token is still on its way
        self._seats = config.max_running
        self._budget_s = inf
        self._late = 0  # prompts that can no longer be in time

    def stats(self) -> PolicyStats:
        ledger = self._ledger
        return PolicyStats(
            speed=self._cost.rho,
            margin=MARGIN,
            step_budget_s=self._budget_s if ledger.decoding and self._budget_s < inf else None,
            demoted=self._late if ledger.waiting or ledger.filling else 0,
            predicted_step_s=self._cost.predicted_s,
        )

    def observe(self, event: Event) -> None:
        track = self._ledger.observe(event)
        if track is not None and track in self._batch:  # it has ended or must wait again
            self._batch.remove(track)
        if isinstance(event, StepDone):
            self._cost.observe(work_of(event.plan.rows), event.duration_s)

    def begin(self, view: View) -> Decision:
        self._promote()
        decoding = list(self._ledger.decoding.values())
        tokens = self._room(view, decoding)
        chunks, starts, free_blocks = {}, [], view.free_blocks
        seats = min(view.free_seats, self._seats - len(view.running))
        for track, left in self._order(view) if tokens > 0 else ():
            if tokens <= 0:
                break
            request = track.request
            if request.request_id in self._ledger.waiting:
                blocks = -(-len(track.tokens) // view.block_size)
                if seats <= 0 or blocks > free_blocks:
                    continue
                seats -= 1
                free_blocks -= blocks
                starts.append(request)
            chunks[request.request_id] = min(left, tokens)
            tokens -= chunks[request.request_id]
        filling = [track.request for track in self._ledger.filling.values()]
        rows = [*(track.request for track in decoding), *filling]
        return PlannedDecision(rows, chunks, starts)

    def _promote(self) -> None:
        """Token deadlines count from the real first token."""
        decoding = self._ledger.decoding
        for track in [*self._unseen, *self._ledger.promote()]:
            request = track.request
            if request.first_token_s and track.tpot_s < inf and request.request_id in decoding:
                self._batch.add(track, request.first_token_s)
        self._unseen = [track for track in decoding.values() if not track.request.first_token_s]

    def _room(self, view: View, decoding: list[Track]) -> int:
        """Prompt tokens that fit before the first decoding request is late."""
        limit = min(LONGEST_CHUNK, view.token_budget - len(decoding))
        slack = min(self._batch.due(self._batch.context()), default=inf) - view.now_s
        self._budget_s = slack
        if slack == inf:
            return limit
        params = self._cost.params
        context = sum(len(track.tokens) for track in decoding)
        decode_s = params.seconds(Work(0, 0.0, len(decoding), context))
        spare = slack - decode_s
        self._budget_s = max(slack, decode_s)
        return int(max(0.0, min(limit, spare / params.token_s)))

    def _order(self, view: View) -> list[tuple[Track, int]]:
        """Prompts that run or could start, the most urgent first, with the tokens left of each."""
        params = self._cost.params
        found = [(track, track.request.remaining) for track in self._ledger.filling.values()]
        for lead in view.waiting():
            found += [(self._ledger.waiting[each.request_id], view.uncached(each)) for each in view.members(lead)]
        queued_s = params.token_s * sum(left for _, left in found)
        weight = WEIGHT_LOADED_S if queued_s > LOADED_S else WEIGHT_LIGHT_S

        in_time: list[tuple[float, Track, int]] = []
        late: list[tuple[float, Track, int]] = []
        for track, left in found:
            due_s = track.due_s if track.due_s < inf else track.request.arrival_s + AGEING_S
            missed = view.now_s + params.step_s + params.token_s * left > due_s
            (late if missed else in_time).append((due_s + weight * left, track, left))
        self._late = sum(track.due_s < inf for _, track, _ in late)
        by_key = itemgetter(0)
        return [(track, left) for _, track, left in sorted(in_time, key=by_key) + sorted(late, key=by_key)]
