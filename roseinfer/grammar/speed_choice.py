"""Choice between two ways to do the same work, by how long each takes on this machine."""

from collections import deque
from statistics import median

# The newest times of an option, whose median counts.
_WINDOW_COUNT = 5
# Pieces of work until the slower option is tried again; the number doubles with each trial.
_MIN_TRIAL_COUNT, _MAX_TRIAL_COUNT = 64, 8192


class _Record:
    """Times of work of about one size."""

    def __init__(self) -> None:
        self.times: tuple[deque[float], deque[float]] = (deque(maxlen=_WINDOW_COUNT), deque(maxlen=_WINDOW_COUNT))
        self.gap = _MIN_TRIAL_COUNT
        self.left = _MIN_TRIAL_COUNT

    def choose(self) -> int:
        for option, times in enumerate(self.times):
            if len(times) < _WINDOW_COUNT:
                return option
        best = self.best
        return 1 - best if self.left <= 0 else best

    @property
    def best(self) -> int:
        first, second = self.times
        return int(median(second) < median(first))

    def record(self, option: int, seconds: float) -> None:
        whole = all(len(times) == _WINDOW_COUNT for times in self.times)
        if whole and option != self.best:
            self.gap = min(2 * self.gap, _MAX_TRIAL_COUNT)
            self.left = self.gap
        self.left -= 1
        self.times[option].append(seconds)


class SpeedChoice:
    """Choose between options 0 and 1. Both are tried at the start, the slower one again from time to time.

    When the chosen option becomes slower than the other was, the other is chosen at once.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def choose(self, size: int) -> int:
        """Return the option for the next piece of work of this size, at least 1.

        Sizes within a power of two share their times.
        """
        return self._record(size).choose()

    def record(self, option: int, size: int, seconds: float) -> None:
        """Record how long a piece of work took."""
        self._record(size).record(option, seconds / size)

    def _record(self, size: int) -> _Record:
        return self._records.setdefault(size.bit_length(), _Record())
