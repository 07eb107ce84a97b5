"""Forward-looking utilisation: what the requests that run need within some horizons, against what there is.

A request that is ahead of its token deadlines by `slack` needs nothing until then, and afterwards `weight` seconds of
the machine per second. Over a horizon h that is weight * max(0, h - slack). Nobody is assumed to leave: those that do
are replaced, and a wrong guess of who leaves costs more than it gains.
"""

from collections.abc import Sequence

HORIZONS = (16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # times the smallest TPOT objective


class Demand:
    """Shares of the machine by horizon, of decoding and of prompts. `peak` is the largest sum.

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
