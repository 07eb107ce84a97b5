"""How fast the machine is at present, from what steps take beside what they should: changes of its speed, which last,
and stalls, which do not.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

_GAIN = 0.02  # of a step's error: how fast small changes are followed
_LARGEST_ERROR = 0.25  # relative, of one step, as far as it counts
_WINDOW = 7  # steps of which the median tells a change of speed from a stall
_NEWEST = 4  # of these: as many as make a median, and what the new speed is taken from
_LEAST_CHANGE = 0.1  # relative, of that median
_CLEARLY = 4.5  # times the median's usual deviation
_USUAL_GAIN = 1 / 64

STALL_FACTOR = 2.0  # times what a step should have taken
STALLS_WINDOW_S = 120.0
_LEAST_WINDOW_S = 30.0  # one stall in the first second says little of how many there will be
_MOST_STALLS = 64
_STALL_SHARE = 0.125  # of the steps: were there more, it would be the model that is wrong
_SHARE_GAIN = 1 / 64
_SETTLED = 50  # steps, before which a model that has just begun to learn is wrong more often than a machine stalls


class SpeedTracker:
    """`rho`: seconds that steps take per second of the fitted shape. `level` is what jumped of it: the shape is fitted
    to seconds / level, so that a machine that is slow for a while does not bend it.

    The median of the last 7 ratios says whether the speed changed: one that lasts is followed after 4 steps, and up to
    3 outliers in 7 steps move nothing. What is clearly more than usual depends on how far that median strays otherwise,
    be it for noise or for work that the model does not describe well.
    """

    def __init__(self) -> None:
        self.rho = self.level = 1.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._usual = 0.025

    def observe(self, ratio: float, largest_error: float) -> bool:
        """A step took `ratio` times what the shape says at this level. True if the level changed.

        `largest_error`: relative, as far as this step may count by itself; 0 = it was a stall.
        """
        fine = self.rho / self.level
        most = min(largest_error, _LARGEST_ERROR)
        self.rho *= 1 + _GAIN * max(-most, min(most, ratio / fine - 1))
        ratios = self._ratios
        ratios.append(ratio)
        if len(ratios) <= _NEWEST:
            return False
        middle = sorted(ratios)[len(ratios) // 2] / fine
        change = abs(middle - 1) if middle > 1 else abs(1 / middle - 1)
        if change > max(_LEAST_CHANGE, _CLEARLY * self._usual):
            self.level *= median(list(ratios)[-_NEWEST:])
            self.rho = self.level
            ratios.clear()
            return True
        self._usual += _USUAL_GAIN * (change - self._usual)
        return False


@dataclass(frozen=True, slots=True)
class StallStats:
    """Of the last two minutes in which steps ran. `count`: stalls. `share`: seconds lost in them per second.
    `typical_s`, `longest_s`: lost in the median and in the longest one.
    """

    count: int = 0
    share: float = 0.0
    typical_s: float = 0.0
    longest_s: float = 0.0


class StallDetector:
    """Steps that took far longer than they should have, while those around them did not."""

    def __init__(self) -> None:
        self._steps = 0
        self._busy_s = 0.0
        self._often = 0.0  # share of the steps lately
        self._found: deque[tuple[int, float, float]] = deque(maxlen=_MOST_STALLS)  # step, when, seconds lost

    def observe(self, seconds: float, expected_s: float, *, sure: bool) -> bool:
        """Whether this step is one; the first 50 steps are not counted. `sure`: whether the model knows what such
        a step takes.
        """
        self._steps += 1
        self._busy_s += seconds
        stalled = sure and seconds > STALL_FACTOR * expected_s
        self._often += _SHARE_GAIN * (stalled - self._often)
        if not stalled or self._often > _STALL_SHARE:
            return False
        if self._steps > _SETTLED:
            self._found.append((self._steps, self._busy_s, seconds - expected_s))
        return True

    def retract(self) -> None:
        """The newest were no stalls: the machine became slower."""
        while self._found and self._found[-1][0] > self._steps - _WINDOW:
            self._found.pop()

    def stats(self) -> StallStats:
        """As of the newest step."""
        since_s = self._busy_s - STALLS_WINDOW_S
        while self._found and self._found[0][1] < since_s:
            self._found.popleft()
        if not self._found:
            return StallStats()
        lost = [lost_s for _, _, lost_s in self._found]
        span_s = min(STALLS_WINDOW_S, max(_LEAST_WINDOW_S, self._busy_s))
        return StallStats(len(lost), sum(lost) / span_s, median(lost), max(lost))
