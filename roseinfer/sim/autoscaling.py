"""Simulated fleets whose number of engines follows the load."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import End, FinishReason
from roseinfer.core.request import sequence_id
from roseinfer.priced.machine import Machine
from roseinfer.router.fleet_size import FleetState, fleet_size, fullness, too_many_rejections
from roseinfer.sched.estimates import Estimates
from roseinfer.sim.fleet import FleetRequest, SimulatedFleet, SimulatedReplica
from roseinfer.sim.fleet_plan import AutoscalePlan, FleetPlan, FleetRun
from roseinfer.sim.report import adherence
from roseinfer.sim.workload import Arrival

TICK_S = 5.0  # between two looks


class Autoscaler:
    """Recent observations of a fleet, and the number of engines that follows. Times must not decrease."""

    def __init__(self, plan: AutoscalePlan) -> None:
        self._plan = plan
        self._used: deque[tuple[float, float]] = deque()
        self._promised: deque[float] = deque()
        self._refused: deque[float] = deque()
        self._calm_s: float | None = None  # since when fewer would do

    def promised(self, at_s: float) -> None:
        """Record a request with objectives."""
        self._promised.append(at_s)

    def rejected(self, at_s: float) -> None:
        """Record a rejection that an idle engine would not have made."""
        self._refused.append(at_s)

    def look(self, at_s: float, used: float) -> None:
        """Record the load. `used`: mean `fullness` of the running engines."""
        self._used.append((at_s, used))
        since_s = at_s - self._plan.window_s
        while self._used[0][0] < since_s:
            self._used.popleft()
        for seen in (self._promised, self._refused):
            while seen and seen[0] < since_s:
                seen.popleft()

    @property
    def used(self) -> float:
        """Mean over the window."""
        return fmean(used for _, used in self._used)

    def wanted(self, at_s: float, running: int, coming: int, waiting: int = 0) -> int:
        """Return how many engines there should be, including those that are `coming`. Call it after `look`.

        `waiting`: requests that wait for a seat now.
        """
        too_many = too_many_rejections(self._plan, len(self._promised), len(self._refused))
        fleet = FleetState(at_s, running, coming, self.used, too_many, waiting)
        size, self._calm_s = fleet_size(self._plan, fleet, self._calm_s)
        return size

    def grown(self) -> None:
        """Drop earlier observations, because one more engine serves now."""
        for seen in (self._used, self._promised, self._refused):
            seen.clear()

    def wait(self) -> None:
        """Restart the waiting time, after an engine was removed or a simulation was against it."""
        self._calm_s = None


class AutoscaledFleet(SimulatedFleet):
    """Fleet with `plan.scaling`. An engine drains first: waiting requests are placed elsewhere, the others finish."""

    def run(self) -> FleetRun:
        assert self.plan.scaling is not None
        self._scaler = Autoscaler(self.plan.scaling)
        self.record.sizes.append((0.0, self.plan.replicas))
        self.at(TICK_S, self._look)
        return super().run()

    def _start(self, slot: SimulatedReplica) -> None:
        super()._start(slot)
        self._scaler.grown()

    # --- what is seen -------------------------------------------------------------------------------------------
    def _arrive(self) -> None:
        slo = self._arrivals[self._number].slo
        if slo is not None and not slo.empty:
            self._scaler.promised(self.now_s)
        super()._arrive()

    def _end(self, call: FleetRequest, end: End) -> None:
        super()._end(call, end)
        if call.life.reason is FinishReason.REJECTED:
            rejection = call.life.rejection
            if rejection is None or not rejection.hopeless:
                self._scaler.rejected(self.now_s)

    def _deliver(self, slot: SimulatedReplica) -> None:
        super()._deliver(slot)
        if slot.draining:
            self._retire(slot)

    # --- what follows -------------------------------------------------------------------------------------------
    def _look(self) -> None:
        if self._number < len(self._arrivals):
            self.at(self.now_s + TICK_S, self._look)
        running = [slot for slot in self.slots if slot.engine is not None and not slot.draining]
        coming = [slot for slot in self.slots if slot.engine is None and slot.asked_s is not None]
        if not running:
            return
        self._scaler.look(self.now_s, fmean(fullness(slot.promise, self.now_s) for slot in running))
        size = len(running) + len(coming)
        waiting = sum(slot.promise.waiting for slot in running)
        wanted = self._scaler.wanted(self.now_s, len(running), len(coming), waiting)
        if wanted > size:
            self._grow(wanted - size)
        elif wanted < size:
            self._scaler.wait()
            if self._would_do(wanted):
                self._drain(running[-1])

    def _grow(self, count: int) -> None:
        """Add engines: draining engines stay, and others are started."""
        draining = [slot for slot in self.slots if slot.draining]
        free = [slot for slot in self.slots if slot.asked_s is None]
        for slot in (draining + free)[:count]:
            if slot.draining:
                slot.draining = False
                self._publish(slot)
            else:
                slot.asked_s = self.now_s
                self.at(self.now_s + self.plan.start_s, partial(self._start, slot))
        self._note_size()

    def _would_do(self, size: int) -> bool:
        """True if so many engines would have met the target of the last requests."""
        assert self.plan.scaling is not None
        since_s = self.now_s - self.plan.scaling.recent_s
        recent = [
            replace(arrival, at_s=arrival.at_s - since_s)
            for arrival in self._arrivals[: self._number]
            if arrival.at_s >= since_s
        ]
        if not recent:
            return True
        plan = FleetPlan(size, self.plan.router)
        run = SimulatedFleet(recent, self._scheduler, self._machine, plan, self._estimates, self._seed).run()
        kept = adherence(run.simulation.lifetimes)
        return kept is None or kept >= self.plan.scaling.target

    def _drain(self, slot: SimulatedReplica) -> None:
        assert slot.engine is not None
        slot.draining = True
        self._publish(slot)
        running = slot.engine.core.scheduler.running
        for call in self.calls_of(slot):
            if not call.life.token_s and sequence_id(call.name, 0) not in running:
                self.withdraw(slot, call)
                self._place(call)
        self._note_size()
        self._retire(slot)

    def _retire(self, slot: SimulatedReplica) -> None:
        """Remove a draining engine once it has no requests."""
        if self.calls_of(slot):
            return
        assert slot.asked_s is not None
        slot.totals.served_s += self.now_s - slot.asked_s
        slot.asked_s = None
        self._stop(slot)

    def _note_size(self) -> None:
        asked = sum(slot.asked_s is not None and not slot.draining for slot in self.slots)
        self.record.sizes.append((self.now_s, asked))


def simulate_fleet(
    arrivals: Sequence[Arrival],
    scheduler: SchedulerConfig,
    machine: Machine,
    plan: FleetPlan,
    estimates: Callable[[int], Estimates],
    seed: int = 0,
) -> FleetRun:
    """`arrivals` are sorted by time. `estimates(seed)`: what an engine's policy knows when it starts.

    Raises as `simulate` for one engine.
    """
    kind = AutoscaledFleet if plan.scaling is not None else SimulatedFleet
    return kind(arrivals, scheduler, machine, plan, estimates, seed).run()
