"""KV blocks for the rows of requests that run, and who gives up its own when there are too few."""

from roseinfer.core.request import Request, Status
from roseinfer.kv.manager import KvManager
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import Decision
from roseinfer.sched.roster import Roster


class RowAllocator:
    """Of one scheduler."""

    def __init__(self, kv: KvManager, roster: Roster) -> None:
        self._kv, self._roster = kv, roster

    def grow(self, draft: PlanBuilder, decision: Decision, short: list[tuple[Request, int]]) -> None:
        """Rows (a request and its tokens) that need new blocks or a copy-on-write: all at once if the pool has them,
        else one by one.
        """
        grown = self._kv.grow_many([(r.request_id, r.planned + count) for r, count in short])
        if grown is not None:
            for (request, count), growth in zip(short, grown, strict=True):
                request.capacity = self._kv.capacity(request.request_id)
                draft.take(request, count, growth)
            return
        for request, count in short:
            if request.status is Status.RUNNING:
                self._grow_or_preempt(draft, decision, request, count)

    def _grow_or_preempt(self, draft: PlanBuilder, decision: Decision, request: Request, count: int) -> None:
        running, offload = self._roster.running, self._roster.offload
        while True:
            upto = request.planned + count
            growth = self._kv.grow(request.request_id, upto)
            if growth is not None:
                request.capacity = self._kv.capacity(request.request_id)
                draft.take(request, count, growth)
                return
            if self._kv.growth_cost(request.request_id, upto) <= self._kv.num_free + self._blocks_coming():
                return  # enough is on its way: this row sits out a step
            if offload is not None and offload.reclaim(loads=True):
                continue
            victim = decision.victim(tuple(running.values()))
            if victim is None or not self.preempt(draft, victim) or victim is request:
                return

    def _blocks_coming(self) -> int:
        """Blocks of preempted and ended requests that submitted steps still name (an upper bound: some are shared)."""
        requests, offload = self._roster.requests, self._roster.offload
        leaving = (r for r in requests.values() if r.seat is not None and r.status is not Status.RUNNING)
        stored = 0 if offload is None else offload.blocks_coming
        return stored + sum(len(self._kv.table(r.request_id)) for r in leaving)

    def preempt(self, draft: PlanBuilder, victim: Request) -> bool:
        """Send a running request back to the head of the queue, without its row. False: it does not run."""
        if self._roster.running.get(victim.request_id) is not victim:
            self._roster.fault("took blocks from a request that does not run")
            return False
        if victim in draft:
            draft.drop(victim)
        self._roster.preempt(victim)
        return True
