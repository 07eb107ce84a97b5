"""Which of two ways to do the same work is the faster one here and now, found by doing it."""

from collections import deque
from statistics import median

_WINDOW = 5  # newest times of a way, whose median counts
_FIRST_TRIAL, _LAST_TRIAL = 64, 8192  # pieces of work until the slower way is tried again, doubled each time


class _Record:
    """Work of about one size."""

    def __init__(self) -> None:
        self.times: tuple[deque[float], deque[float]] = (deque(maxlen=_WINDOW), deque(maxlen=_WINDOW))
        self.gap = _FIRST_TRIAL
        self.left = _FIRST_TRIAL

    def choose(self) -> int:
        for way, times in enumerate(self.times):
            if len(times) < _WINDOW:
                return way
        best = self.best
        return 1 - best if self.left <= 0 else best

    @property
    def best(self) -> int:
        first, second = self.times
        return int(median(second) < median(first))

    def note(self, way: int, seconds: float) -> None:
        whole = all(len(times) == _WINDOW for times in self.times)
        if whole and way != self.best:
            self.gap = min(2 * self.gap, _LAST_TRIAL)
            self.left = self.gap
        self.left -= 1
        self.times[way].append(seconds)


class Faster:
    """Ways 0 and 1 of work that comes in sizes. At the start each is tried, later the slower one now and then.

    When the chosen one becomes slower than the other was, the other is chosen at once.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def choose(self, size: int) -> int:
        """The way for the next piece of work of this size, at least 1. Sizes within a power of two are alike."""
        return self._record(size).choose()

    def note(self, way: int, size: int, seconds: float) -> None:
        """How long a piece took."""
        self._record(size).note(way, seconds / size)

    def _record(self, size: int) -> _Record:
        return self._records.setdefault(size.bit_length(), _Record())
