"""What the machine can take in the long run: demand over some horizons, and the margins for what one cannot see."""

from collections.abc import Sequence
from math import log

HORIZONS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # times the smallest TPOT objective
SHORT = 2  # of these, where only prompts count: how soon one can be through


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
        shares = [d + (p + half if p > half else arriving) for d, p in zip(decoding, prompts, strict=True)]
        self.peak = max(shares[SHORT:])
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

    def decoding_within(self, seconds: float) -> float:
        """The share of the next `seconds` that decoding needs, by the nearest longer horizon."""
        for horizon_s, share in zip(self._horizons_s, self._decoding, strict=True):
            if seconds <= horizon_s:
                return share
        return self._decoding[-1]


class Margins:
    """The share of a TPOT objective by which token deadlines are brought forward, for each level of objectives (within
    some 10% of each other) its own: a few strict requests among many loose ones would not count otherwise.

    Up a little for each finished request that came near its limit, down very little for each other. In the steady state
    about one request in 21 comes near its limit.
    """

    START, FLOOR, CEILING = 0.02, 0.005, 0.15
    UP, DOWN, NEAR = 0.004, 0.0002, 0.995
    MOST_LEVELS = 64

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self.changed = False

    def of(self, tpot_s: float) -> float:
        return self._values.get(_level(tpot_s), self.START)

    def observe(self, seen_s: float, tpot_s: float) -> None:
        level = _level(tpot_s)
        old = self._values.pop(level, self.START)
        step = self.UP if seen_s > self.NEAR * tpot_s else -self.DOWN
        self._values[level] = min(self.CEILING, max(self.FLOOR, old + step))
        if len(self._values) > self.MOST_LEVELS:
            del self._values[next(iter(self._values))]  # the one not heard of for longest


def _level(tpot_s: float) -> int:
    return round(log(tpot_s) / log(1.1))
