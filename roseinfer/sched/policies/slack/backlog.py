"""The waiting requests in the order of their keys, those that are too expensive at present apart."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from roseinfer.core.request import Request, Status
from roseinfer.sched.policies.common.ledger import Track

Entry = tuple[float, int, Track]
_FEW = 64  # entries that are not worth tidying


class Backlog:
    """`affordable`, `parked` and those without objectives, `rest`, are sorted by key. Requests that wait no longer are
    dropped when they are met, or by `tidy`. One that was preempted gets a new entry, and its former one counts no more.
    """

    def __init__(self) -> None:
        self.affordable: list[Entry] = []
        self.parked: list[Entry] = []
        self.rest: list[Entry] = []
        self._latest: list[Entry] = []
        self._order = count()
        self._tidy_at = self._tidy_latest_at = _FEW

    def add(self, track: Track, worth: bool) -> None:
        """`worth`: whether a request with objectives is worth its cost at present."""
        entries = self.affordable if worth else self.parked
        if not track.owed:
            entries = self.rest
        number = track.entry = next(self._order)
        insort(entries, (track.key, number, track))

    def tidy(self) -> None:
        """Drop the entries that nobody meets while another policy decides; costs next to nothing per request."""
        if self._size >= self._tidy_at:
            self.affordable = [entry for entry in self.affordable if _waits(entry)]
            self.parked = [entry for entry in self.parked if _waits(entry)]
            self.rest = [entry for entry in self.rest if _waits(entry)]
            self._tidy_at = max(_FEW, 2 * self._size)

    @property
    def _size(self) -> int:
        return len(self.affordable) + len(self.parked) + len(self.rest)

    def watch(self, track: Track, latest_s: float) -> None:
        """Have `overdue` report the request if it still waits at `latest_s`."""
        heappush(self._latest, (latest_s, next(self._order), track))
        if len(self._latest) >= self._tidy_latest_at:  # most start long before, and some have days
            self._latest = [entry for entry in self._latest if entry[2].request.status is Status.WAITING]
            heapify(self._latest)
            self._tidy_latest_at = max(_FEW, 2 * len(self._latest))

    def overdue(self, now_s: float) -> list[Track]:
        found = []
        while self._latest and self._latest[0][0] < now_s:
            track = heappop(self._latest)[2]
            if track.request.status is Status.WAITING:
                found.append(track)
        return found

    def sort_by_price(self, worth: Callable[[Track], bool]) -> None:
        waiting = [entry for entry in self.affordable + self.parked if _waits(entry)]
        waiting.sort()
        self.affordable, self.parked = [], []
        for entry in waiting:
            (self.affordable if worth(entry[2]) else self.parked).append(entry)


def _waits(entry: Entry) -> bool:
    _, number, track = entry
    return track.request.status is Status.WAITING and track.entry == number


def first_of(
    entries: list[Entry],
    can_start: Callable[[Request], bool],
    siblings: Callable[[Track], Iterable[Track]],
    most: int,
) -> Iterator[Track]:
    """The first `most` of those that could start, each followed by its `siblings`: the samples of the same request
    that could start with it. Drops those that wait no longer from the head.

    Those that could not start do not count: many samples may wait for one that is further behind.
    """
    gone = 0
    while gone < len(entries) and not _waits(entries[gone]):
        gone += 1
    del entries[:gone]
    left = most
    for _, number, track in entries:  # `_waits`, spelled out: a step looks at many
        request = track.request
        if request.status is Status.WAITING and track.entry == number and can_start(request):
            yield track
            if request.fork_of is not None:  # else it is sample 0, for which the others wait
                yield from siblings(track)
            left -= 1
            if not left:
                return
