"""Whether workers move: each counts the beats of its event loop in memory that the manager looks at."""

import asyncio
from dataclasses import dataclass

from roseinfer.server.workers.counters import Count, SharedCounters

# Between beats, and between the manager's looks.
INTERVAL_S = 0.25
# A worker without a beat for so long gets no connections until it moves again.
QUIET_S = 1.0
# Until its event loop turns for the first time a worker imports and connects, which may take long on a slow disk.
START_S = 120.0


class Pulse:
    """A worker's side: beats as long as the event loop turns."""

    def __init__(self, counters: SharedCounters, index: int) -> None:
        self._counters = counters
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._beat()

    def _beat(self) -> None:
        self._counters.add(self._index, Count.BEATS, 1)
        self._timer = self._loop.call_later(INTERVAL_S, self._beat)

    def stop(self) -> None:
        self._timer.cancel()


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a worker has not moved, and whether that is too long for connections (`quiet`) or for all (`hung`)."""

    seconds: float
    quiet: bool
    hung: bool


@dataclass(slots=True)
class _Seen:
    number: int
    beats: int = 0
    looks: int = 0


class Heartbeats:
    """The manager's side. A worker is hung after `timeout_s` seconds without a beat.

    Silence is counted in looks, `INTERVAL_S` apart, and not on a clock: whatever stops the manager too, as a debugger
    or a suspended machine does, is no fault of the workers.
    """

    def __init__(self, counters: SharedCounters, timeout_s: float) -> None:
        self._counters = counters
        self._timeout_s = timeout_s
        self._seen: dict[int, _Seen] = {}

    def look(self, index: int, number: int, serving: bool) -> Silence:
        """To be called every `INTERVAL_S` seconds. `number` tells a worker from those that had its index before."""
        seen = self._seen.get(index)
        if seen is None or seen.number != number:
            seen = self._seen[index] = _Seen(number)
        beats = self._counters.get(index, Count.BEATS)
        seen.looks = seen.looks + 1 if beats == seen.beats else 0
        seen.beats = beats
        seconds = seen.looks * INTERVAL_S
        limit_s = self._timeout_s if serving else max(self._timeout_s, START_S)
        return Silence(seconds, quiet=serving and seconds >= QUIET_S, hung=seconds >= limit_s)
