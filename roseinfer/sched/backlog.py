"""The waiting requests in the order of their keys, those that are too expensive at present apart."""

from bisect import insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf

from roseinfer.core.request import Status
from roseinfer.sched.ledger import Track

Entry = tuple[float, int, Track]


class Backlog:
    """`affordable` and `parked` are sorted by key. Requests that wait no longer are dropped when they are met."""

    def __init__(self) -> None:
        self.affordable: list[Entry] = []
        self.parked: list[Entry] = []
        self._latest: list[Entry] = []
        self._order = count()

    def add(self, track: Track, limit_s: float) -> None:
        """`limit_s`: seconds of work from which a request with objectives is too expensive."""
        entries = self.parked if limit_s < track.work_s and track.tpot_s < inf else self.affordable
        insort(entries, (track.key, next(self._order), track))

    def watch(self, track: Track, latest_s: float) -> None:
        """Have `overdue` report the request if it still waits at `latest_s`."""
        heappush(self._latest, (latest_s, next(self._order), track))

    def overdue(self, now_s: float) -> list[Track]:
        found = []
        while self._latest and self._latest[0][0] < now_s:
            track = heappop(self._latest)[2]
            if track.request.status is Status.WAITING:
                found.append(track)
        return found

    def sort_by_price(self, limit_s: float) -> None:
        waiting = [entry for entry in self.affordable + self.parked if entry[2].request.status is Status.WAITING]
        waiting.sort()
        self.affordable = [entry for entry in waiting if entry[2].work_s <= limit_s or entry[2].tpot_s == inf]
        self.parked = [entry for entry in waiting if entry[2].work_s > limit_s and entry[2].tpot_s < inf]


def first_of(entries: list[Entry], can_start: Callable[[Track], bool], most: int) -> Iterator[Track]:
    """The first `most` entries that could start; drops those that wait no longer from the head."""
    gone = 0
    while gone < len(entries) and entries[gone][2].request.status is not Status.WAITING:
        gone += 1
    del entries[:gone]
    for _, _, track in entries[:most]:
        if track.request.status is Status.WAITING and can_start(track):
            yield track
