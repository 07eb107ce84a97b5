"""Share of the last seconds that steps spent on something."""

from math import exp


class RecentShare:
    """Share of the time spent on some work, 0 to about 1, with weights that decay with a time constant of `span_s`.

    `add` records work of that duration that has just ended, `at` returns the share.
    """

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._share = self._at_s = 0.0

    def add(self, seconds: float, now_s: float) -> None:
        self._share, self._at_s = self.at(now_s) + seconds / self._span_s, now_s

    def at(self, now_s: float) -> float:
        age_s = now_s - self._at_s
        return self._share * exp(-age_s / self._span_s) if age_s > 0 else self._share
