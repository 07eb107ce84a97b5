"""Backlog: waiting requests sorted by key; those that are too expensive at present are kept apart."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from roseinfer.core.request import Request, Status
from roseinfer.sched.policies.common.ledger import Track

Entry = tuple[float, int, Track]
_MIN_CLEANUP_COUNT = 64


class Backlog:
    """Waiting requests in three lists sorted by key: `affordable`, `parked` (too expensive), `rest` (no objectives).

    Requests that wait no longer are dropped when a walk reaches them, or by `tidy`. A preempted request gets a new
    entry, and its old one becomes invalid.
    """

    def __init__(self) -> None:
        self.affordable: list[Entry] = []
        self.parked: list[Entry] = []
        self.rest: list[Entry] = []
        self.latest: list[Entry] = []
        self._order = count()
        self._tidy_at = self._tidy_latest_at = _MIN_CLEANUP_COUNT

    def add(self, track: Track, affordable: bool) -> None:
        """Add a request. `affordable`: it is worth its cost at present, or has no objectives."""
        entries = self.affordable if affordable else self.parked
        if not track.is_promised:
            entries = self.rest
        number = track.entry = next(self._order)
        insort(entries, (track.key, number, track))

    def tidy(self) -> None:
        """Drop invalid entries, which no walk reaches while another policy decides. Cheap per request."""
        if self._size >= self._tidy_at:
            self.affordable = [entry for entry in self.affordable if _waits(entry)]
            self.parked = [entry for entry in self.parked if _waits(entry)]
            self.rest = [entry for entry in self.rest if _waits(entry)]
            self._tidy_at = max(_MIN_CLEANUP_COUNT, 2 * self._size)

    @property
    def _size(self) -> int:
        return len(self.affordable) + len(self.parked) + len(self.rest)

    def watch(self, track: Track, latest_s: float) -> None:
        """Let `overdue` report the request if it still waits at `latest_s`."""
        heappush(self.latest, (latest_s, next(self._order), track))
        if len(self.latest) >= self._tidy_latest_at:  # most requests start long before, and some have days
            self.latest = [entry for entry in self.latest if entry[2].request.status is Status.WAITING]
            heapify(self.latest)
            self._tidy_latest_at = max(_MIN_CLEANUP_COUNT, 2 * len(self.latest))

    def overdue(self, now_s: float) -> list[Track]:
        found = []
        while self.latest and self.latest[0][0] < now_s:
            track = heappop(self.latest)[2]
            if track.request.status is Status.WAITING:
                found.append(track)
        return found

    def sort_by_price(self, is_affordable: Callable[[Track], bool]) -> None:
        waiting = [entry for entry in self.affordable + self.parked if _waits(entry)]
        waiting.sort()
        self.affordable, self.parked = [], []
        for entry in waiting:
            (self.affordable if is_affordable(entry[2]) else self.parked).append(entry)


def _waits(entry: Entry) -> bool:
    _, number, track = entry
    return track.request.status is Status.WAITING and track.entry == number


def first_of(
    entries: list[Entry],
    can_start: Callable[[Request], bool],
    siblings: Callable[[Track], Iterable[Track]],
    most: int,
) -> Iterator[Track]:
    """Yield the first `most` entries that could start, each followed by its `siblings`: samples that start with it.
    Invalid entries are dropped from the head. Entries that cannot start do not count towards `most`, because many
    samples may wait for one that comes later.
    """
    gone = 0
    while gone < len(entries) and not _waits(entries[gone]):
        gone += 1
    del entries[:gone]
    left = most
    for _, number, track in entries:  # `_waits`, inlined: a step visits many entries
        request = track.request
        if request.status is Status.WAITING and track.entry == number and can_start(request):
            yield track
            if request.fork_of is not None:  # sample 0 starts alone, because the others wait for it
                yield from siblings(track)
            left -= 1
            if not left:
                return
