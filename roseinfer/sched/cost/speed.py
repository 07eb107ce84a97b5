"""Speed of the machine, from the measured and predicted times of steps: lasting changes of speed, and single stalls."""

from collections import deque
from dataclasses import dataclass
from statistics import median

_RHO_GAIN_SHARE = 0.02  # weight of a step's error in rho
_MAX_ERROR_SHARE = 0.25  # a larger relative error of one step counts as this one
_WINDOW_STEPS = 7  # their median distinguishes a change of speed from a stall
_NEWEST_STEPS = 4  # the majority of the window; the new speed is their median
_MIN_CHANGE_SHARE = 0.1  # relative change of the window's median
_MIN_CHANGE_DEVIATIONS = 4.5  # change of the median, in its usual deviations
_DEVIATION_GAIN_SHARE = 1 / 64
_LASTING_GAIN_SHARE = 1 / 128

MIN_STALL_RATIO = 2.0  # measured time of a stall, as a multiple of the predicted time
STALLS_WINDOW_S = 120.0
_MIN_WINDOW_S = 30.0  # early on, one stall in the first second must not count as one per second
_MAX_STALLS = 64
_MAX_STALL_SHARE = 0.125  # above this share of steps the model is wrong, not the machine slow
_STALL_GAIN_SHARE = 1 / 64
_SETTLING_STEPS = 50  # before these, wrong predictions are more frequent than stalls


class SpeedTracker:
    """Present speed of the machine. `rho`: measured seconds per second of the fitted shape.

    `level` is the part of `rho` that changed in jumps. The shape is fitted to seconds / level, so that a slow period of
    the machine does not distort it.

    The median of the last 7 ratios shows whether the speed has changed. A lasting change is followed after 4 steps, and
    up to 3 outliers in 7 steps change nothing. The threshold adapts to how much the median usually varies, because of
    noise or of work that the model describes badly.

    `lasting`: mean of `rho` over some 128 steps. Other work on the device for a few steps hardly changes it.
    """

    def __init__(self) -> None:
        self.rho = self.level = self.lasting = 1.0
        self._ratios: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._usual = 0.025

    def observe(self, ratio: float, largest_error: float) -> bool:
        """Update from a step that took `ratio` times the shape's prediction at this level. Return True if it changed.

        `largest_error`: a larger relative error of this step counts as this one; 0 = the step was a stall.
        """
        self.lasting += _LASTING_GAIN_SHARE * (self.rho - self.lasting)
        fine = self.rho / self.level
        most = min(largest_error, _MAX_ERROR_SHARE)
        self.rho *= 1 + _RHO_GAIN_SHARE * max(-most, min(most, ratio / fine - 1))
        ratios = self._ratios
        ratios.append(ratio)
        if len(ratios) <= _NEWEST_STEPS:
            return False
        middle = sorted(ratios)[len(ratios) // 2] / fine
        change = abs(middle - 1) if middle > 1 else abs(1 / middle - 1)
        if change > max(_MIN_CHANGE_SHARE, _MIN_CHANGE_DEVIATIONS * self._usual):
            self.level *= median(list(ratios)[-_NEWEST_STEPS:])
            self.rho = self.level
            ratios.clear()
            return True
        self._usual += _DEVIATION_GAIN_SHARE * (change - self._usual)
        return False


@dataclass(frozen=True, slots=True)
class StallStats:
    """Stalls in the last two minutes of running steps. `share`: seconds lost in stalls per second.

    `typical_s`: seconds lost in the median stall.
    """

    count: int = 0
    share: float = 0.0
    typical_s: float = 0.0


class StallDetector:
    """Detector of stalls: single steps that took far longer than predicted."""

    def __init__(self) -> None:
        self._steps = 0
        self._busy_s = 0.0
        self._stall_share = 0.0  # smoothed share of steps that stalled
        self._stall_list: deque[tuple[int, float, float]] = deque(maxlen=_MAX_STALLS)  # step, when, seconds lost

    def observe(self, seconds: float, expected_s: float, *, sure: bool) -> bool:
        """Return True if this step is a stall. The first 50 steps are not counted in the statistics.

        `sure`: the model knows what such a step takes.
        """
        self._steps += 1
        self._busy_s += seconds
        stalled = sure and seconds > MIN_STALL_RATIO * expected_s
        self._stall_share += _STALL_GAIN_SHARE * (stalled - self._stall_share)
        if not stalled or self._stall_share > _MAX_STALL_SHARE:
            return False
        if self._steps > _SETTLING_STEPS:
            self._stall_list.append((self._steps, self._busy_s, seconds - expected_s))
        return True

    def retract(self) -> None:
        """Drop the newest stalls, because the machine became slower instead."""
        while self._stall_list and self._stall_list[-1][0] > self._steps - _WINDOW_STEPS:
            self._stall_list.pop()

    def stats(self) -> StallStats:
        """Return the statistics as of the newest step."""
        since_s = self._busy_s - STALLS_WINDOW_S
        while self._stall_list and self._stall_list[0][1] < since_s:
            self._stall_list.popleft()
        if not self._stall_list:
            return StallStats()
        lost = [lost_s for _, _, lost_s in self._stall_list]
        span_s = min(STALLS_WINDOW_S, max(_MIN_WINDOW_S, self._busy_s))
        return StallStats(len(lost), sum(lost) / span_s, median(lost))
