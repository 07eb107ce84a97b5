"""What the machine can take in the long run: demand over some horizons, the work that is worth its price when not all
can be served, and the margin for what one cannot see.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

HORIZONS = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # times the smallest TPOT objective


class Demand:
    """What the requests that run need within some horizons: shares of the machine, of decoding and of prompts. `peak`
    is the largest sum.

    A request that is ahead of its token deadlines by `slack` needs nothing until then, and afterwards `weight` seconds
    of the machine per second: over a horizon h that is weight * max(0, h - slack). Nobody is assumed to leave: those
    that do are replaced, and a wrong guess of who leaves costs more than it gains.

    `arriving`: the share that prompts have had lately, and will need again. That much counts for prompts at least; half
    of it on top of those that are known, since these are part of it.
    """

    def __init__(
        self, horizons_s: Sequence[float], decoding: Sequence[float], prompts: Sequence[float], arriving: float
    ) -> None:
        half = 0.5 * arriving
        self.peak = max([d + (p + half if p > half else arriving) for d, p in zip(decoding, prompts, strict=True)])
        self._horizons_s = horizons_s
        self._decoding = decoding
        self._prompts = prompts
        self._arriving = arriving

    @classmethod
    def of(
        cls, slacks: Sequence[float], weights: Sequence[float], smallest_s: float, arriving: float = 0.0
    ) -> "Demand":
        horizons_s = [smallest_s * horizon for horizon in HORIZONS]
        pairs = list(zip(slacks, weights, strict=True))
        decoding = [sum([(h - s) * w for s, w in pairs if s < h]) / h for h in horizons_s]
        return cls(horizons_s, decoding, [0.0] * len(horizons_s), arriving)

    def with_one(self, weight: float, work_s: float, due_s: float) -> "Demand":
        """With a request whose prompt takes `work_s` seconds within `due_s`, and that takes `weight` from now on.

        The prompt counts as work / h from the horizon on that it is due in.
        """
        horizons_s = self._horizons_s
        prompts = zip(self._prompts, horizons_s, strict=True)
        return Demand(
            horizons_s,
            [share + weight for share in self._decoding],
            [share + work_s / (h if h > due_s else due_s) for share, h in prompts],
            self._arriving,
        )


class PriceLimit:
    """Which requests are worth their cost when not all can be served. `limit_s`: seconds of work per request, inf while
    everything fits.

    If those of the last `window_s` seconds ask for more than the machine can do, most are served well if the cheapest
    are, so the limit is the work at which those up to it fill the machine (`fill` times). A request above it is served
    only while there is room to spare.
    """

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

    def correct(self, now_s: float, more_s: float, price_s: float) -> None:
        """A request that was offered before is `more_s` seconds more work than was said, and now has this price."""
        self._offered.append((now_s, more_s, price_s))

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


@dataclass(slots=True)
class Margin:
    """The share of the TPOT objective by which token deadlines are brought forward. Up a little for each finished
    request that came near its limit, down very little for each other.

    In the steady state about one request in 21 comes near its limit.
    """

    value: float = 0.02
    floor: float = 0.005
    ceiling: float = 0.15
    up: float = 0.004
    down: float = 0.0002
    near: float = 0.995

    def observe(self, tpot_s: float, objective_s: float) -> None:
        step = self.up if tpot_s > self.near * objective_s else -self.down
        self.value = min(self.ceiling, max(self.floor, self.value + step))
