"""Which requests are worth their cost when not all can be served: a limit on a request's work, from what was offered.

If the requests of the last seconds ask for more than the machine can do, goodput is highest when the cheapest are
served, so the limit is the work at which those up to it fill the machine. A request above it is served only while
there is room to spare.
"""

from collections import deque
from math import inf


class PriceLimit:
    """`limit_s`: seconds of work per request; inf while everything fits."""

    def __init__(self, window_s: float = 30.0, fill: float = 1.0, every_s: float = 0.5) -> None:
        self.limit_s = inf
        self._window_s = window_s
        self._fill = fill
        self._every_s = every_s
        self._offered: deque[tuple[float, float, float]] = deque()
        self._next_s = -inf
        self._first_s: float | None = None
        self.mean_s = 0.0  # work of the requests offered, recent ones counting most

    def offer(self, now_s: float, work_s: float, price_s: float) -> None:
        """`price_s`: what counts against the limit, more than the work for a tenant that has had much."""
        self._offered.append((now_s, work_s, price_s))
        self.mean_s += 0.01 * (work_s - self.mean_s) if self.mean_s else work_s
        if self._first_s is None:
            self._first_s = now_s

    def update(self, now_s: float, share: float) -> bool:
        """Set the limit anew, if it is time; `share` of the machine is there for requests."""
        if now_s < self._next_s or self._first_s is None:
            return False
        self._next_s = now_s + self._every_s
        offered = self._offered
        while offered and offered[0][0] < now_s - self._window_s:
            offered.popleft()
        span_s = min(self._window_s, max(now_s - self._first_s, self._window_s / 6))
        left_s = self._fill * share * span_s
        self.limit_s = inf
        if sum([work for _, work, _ in offered]) > left_s:
            for price, work in sorted([(price, work) for _, work, price in offered]):
                left_s -= work
                if left_s < 0:
                    self.limit_s = price
                    break
        return True
