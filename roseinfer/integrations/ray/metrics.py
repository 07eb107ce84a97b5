"""Metrics of all API processes of a deployment together, which any of them may be asked for."""

from collections.abc import Sequence
from dataclasses import replace

from roseinfer.cluster.routed import RoutedEngine
from roseinfer.core.clock import Clock
from roseinfer.integrations.ray.register import EXPIRY_S, SETTLE_S
from roseinfer.server.observe.exposition import Snapshot, combined
from roseinfer.server.observe.metric_registry import Numbers, total

# Snapshots of processes that have not reported for that long are merged into one.
MERGE_AFTER_S = 3600.0


class DeploymentMetrics:
    """Newest metrics of each API process. Counts never go back: those of a process that has ended remain.

    `restarted`: there was an earlier object, whose processes have yet to report.
    """

    def __init__(self, clock: Clock, restarted: bool = False) -> None:
        self._clock = clock
        self._complete_from_s = clock.now() + (SETTLE_S if restarted else 0.0)
        self._newest: dict[str, tuple[Snapshot, float]] = {}
        self._merged: Numbers = {}

    def store(self, process: str, own: Snapshot) -> None:
        now_s = self._clock.now()
        self._newest[process] = own, now_s
        for name, (snapshot, stored_s) in list(self._newest.items()):
            if stored_s < now_s - MERGE_AFTER_S:
                self._merged = total([self._merged, snapshot.numbers])
                del self._newest[name]

    def all(self) -> list[Snapshot] | None:
        """Return the snapshots in the order of the processes' first reports; None while some may still be missing.

        Those of ended processes have numbers only.
        """
        now_s = self._clock.now()
        if now_s < self._complete_from_s:
            return None
        alive_s = now_s - EXPIRY_S
        parts = [
            snapshot if stored_s >= alive_s else Snapshot(snapshot.numbers)
            for snapshot, stored_s in self._newest.values()
        ]
        return [*parts, Snapshot(self._merged)]


def with_engines(own: Snapshot, engine: RoutedEngine | None) -> Snapshot:
    """Return a process's metrics with those of its engines."""
    return Snapshot(own.numbers, [] if engine is None else engine.reports(), own.breakers)


def without_clock(own: Snapshot) -> Snapshot:
    """Return a snapshot for other hosts, which have another clock and know the engines."""
    engines = [replace(report, info=None, promise=None) for report in own.engines]
    return Snapshot(own.numbers, engines, own.breakers)


def deployment_snapshot(own: Snapshot, parts: Sequence[Snapshot]) -> Snapshot:
    """Return the sum of `parts`, with the engines as this process sees them.

    The engines' counts are those of the process that has followed them longest: a younger one does not know what an
    engine counted before its last restart. So these counts do not depend on the process that answers.
    """
    summed = combined(parts)
    counted = {report.engine: report.stats for report in summed.engines}
    engines = [replace(report, stats=counted.get(report.engine, report.stats)) for report in own.engines]
    return Snapshot(summed.numbers, engines, summed.breakers)
