"""KV blocks for the rows of running requests, and preemption when there are too few."""

from roseinfer.core.request import Request, Status
from roseinfer.kv.manager import KvManager
from roseinfer.sched.plan_builder import PlanBuilder
from roseinfer.sched.policy import Decision
from roseinfer.sched.roster import Roster


class RowAllocator:
    """Allocates blocks for rows of running requests. One per Scheduler."""

    def __init__(self, kv: KvManager, roster: Roster) -> None:
        self._kv, self._roster = kv, roster

    def grow(self, builder: PlanBuilder, decision: Decision, short: list[tuple[Request, int]]) -> None:
        """Add rows (a request and its token count) that need new blocks or a copy-on-write.

        All of them grow at once if the pool has enough blocks, else one by one with preemptions.
        """
        grown = self._kv.grow_many([(r.request_id, r.planned + count) for r, count in short])
        if grown is not None:
            for (request, count), growth in zip(short, grown, strict=True):
                request.capacity = self._kv.capacity(request.request_id)
                builder.add_row(request, count, growth)
            return
        for request, count in short:
            if request.status is Status.RUNNING:
                self._grow_or_preempt(builder, decision, request, count)

    def _grow_or_preempt(self, builder: PlanBuilder, decision: Decision, request: Request, count: int) -> None:
        running, offload = self._roster.running, self._roster.offload
        while True:
            upto = request.planned + count
            growth = self._kv.grow(request.request_id, upto)
            if growth is not None:
                request.capacity = self._kv.capacity(request.request_id)
                builder.add_row(request, count, growth)
                return
            leaving, stored = self._leaving(), self._blocks_stored()
            if self._kv.has_room_after(request.request_id, upto, request.planned, leaving, stored):
                return  # enough blocks become free soon: this row waits a step
            if offload is not None and offload.reclaim(loads=True):
                continue
            victim = decision.victim(tuple(running.values()))
            if victim is None or not self.preempt(builder, victim) or victim is request:
                return

    def _leaving(self) -> list[str]:
        """Return the preempted and ended requests whose blocks become free when submitted steps end."""
        requests = self._roster.requests.values()
        return [r.request_id for r in requests if r.seat is not None and r.status is not Status.RUNNING]

    def _blocks_stored(self) -> int:
        offload = self._roster.offload
        return 0 if offload is None else offload.blocks_being_stored

    def preempt(self, builder: PlanBuilder, victim: Request) -> bool:
        """Send a running request back to the head of the queue and drop its row. Return False if it does not run."""
        if self._roster.running.get(victim.request_id) is not victim:
            self._roster.report_fault("preempted a request that is not running")
            return False
        if victim in builder:
            builder.drop_row(victim)
        self._roster.preempt(victim)
        return True
