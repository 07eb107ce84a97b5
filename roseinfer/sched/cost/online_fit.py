"""The cost model of an engine that runs: the constants of `cost.py`, fitted to each step as it is measured.

    seconds = rho * (c0 + cp * Np + ca * X + cd * Nd + ck * K + cb * B + ce * R)

Recursive least squares learn the shape; `rho` follows the present speed, a change by more than noise within 4 steps
(`SpeedTracker`). Steps that verify drafts are not learnt from: such a row is neither a prompt chunk nor a decode, and
the constants of these would drift to explain it.
"""

from collections import deque
from dataclasses import replace
from statistics import median

from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.cost.speed import SpeedTracker, StallDetector, StallStats

# What one unit of each feature is scaled by, so that those of a busy step are about 1. Experts: by their number.
_SCALES = (1.0, 512.0, 131_072.0, 64.0, 32_768.0, 16_384.0)
_DRIFT = 1e-6  # of the noise, per step: how fast the machine's shape may change
_CLIP_MADS = 3.0
_LEAST_CLIP = 0.01  # relative
_NOISE = 0.03  # of a measured step, relative
_LEAST_SURE = 1.0  # of the noise: what steps do not show does not become a guess
_SURE = 0.2  # standard deviation of a step's time, relative, up to which a much longer one is a stall
_LEAST_STEP_S, _LEAST_TOKEN_S = 1e-6, 1e-8  # policies divide by what a prompt token costs


class CostModel:
    """`params` is the present estimate, `rho` included. `observe` learns from each measured step (`steps` of them).
    `predicted_s`: what the model said of the newest of them, before it learnt from it; 0 = none.

    A step that takes far longer than those around it is a stall: counted (`stalls`), and not learnt from.

    `trust` says how sure the first estimate is: its standard deviation relative to a step.
    """

    def __init__(self, params: CostParams | None = None, *, trust: float = 0.02, fit: bool = True) -> None:
        start = params or CostParams()
        self.params = start
        if start.token_s < _LEAST_TOKEN_S:  # fitted to steps of which experts explain all that prompts took, say
            self.params = replace(start, token_s=_LEAST_TOKEN_S)
        self.errors: deque[float] = deque(maxlen=256)  # relative, signed, before each update
        self._fit = fit
        self._speed = SpeedTracker()
        self._stalls = StallDetector()
        experts = start.experts
        self._scales = _SCALES if experts is None else (*_SCALES, float(experts.count))
        self._weights = [value * scale for value, scale in zip(start.values(), self._scales, strict=True)]
        spread = (trust * sum(self._weights)) ** 2
        size = len(self._weights)
        self._cov = [[spread if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._noise = (_NOISE * sum(self._weights)) ** 2
        self._residuals: deque[float] = deque(maxlen=64)
        self._clip = float("inf")
        self.steps = 0
        self.predicted_s = 0.0

    @property
    def rho(self) -> float:
        return self._speed.rho

    @property
    def stalls(self) -> StallStats:
        """How often and how long the machine stalled lately."""
        return self._stalls.stats()

    def seconds(self, work: Work) -> float:
        return self.params.seconds(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds`. Not for steps with compilation, capture or garbage collection."""
        if seconds <= 0:
            self.predicted_s = 0.0
            return
        self.predicted_s = self.params.seconds(work)
        if not work.fits:
            return
        self.steps += 1
        self.errors.append(seconds / self.predicted_s - 1)
        speed = self._speed
        ratio, counts = self._learn(work, seconds, seconds / speed.level)
        if speed.observe(ratio, self._clip if counts else 0.0):
            self._stalls.retract()
        scaled = [speed.rho * w / scale for w, scale in zip(self._weights, self._scales, strict=True)]
        scaled[0], scaled[1] = max(scaled[0], _LEAST_STEP_S), max(scaled[1], _LEAST_TOKEN_S)
        self.params = self.params.with_values(scaled)

    def _learn(self, work: Work, seconds: float, unit_s: float) -> tuple[float, bool]:
        """Fit the shape to a step of `unit_s` seconds at the present level. Returns that over what the shape now says
        (as far as the fit takes the difference on itself, the machine has not changed), and whether it was no stall.
        """
        x = [f / scale for f, scale in zip(self.params.features(work), self._scales, strict=True)]
        shown = [(i, f) for i, f in enumerate(x) if f]  # in most steps there are no prompts
        mx = [sum([line[i] * f for i, f in shown]) for line in self._cov]
        variance = sum([f * m for f, m in zip(x, mx, strict=True)])
        shape_s = max(sum([w * f for w, f in zip(self._weights, x, strict=True)]), _LEAST_STEP_S)
        sure = variance < (_SURE * shape_s) ** 2
        stalled = self._stalls.observe(seconds, self.predicted_s, sure=sure)
        if self._fit and not stalled:
            taken = self._update(mx, variance, unit_s, unit_s - shape_s)
            shape_s = max(shape_s + taken * (unit_s - shape_s), _LEAST_STEP_S)
        return unit_s / shape_s, not stalled

    def _update(self, mx: list[float], variance: float, seconds: float, residual: float) -> float:
        """One step of recursive least squares. A residual counts in full up to 3 median deviations, beyond linearly.

        `mx`: the step's features times the covariance, `variance` that times the features again. Returns the share of
        the residual that the fit has taken on itself.

        Forgetting is a little uncertainty added per step, not a factor: on a machine that does the same for hours a
        factor would grow rounding errors, and doubt about all that these steps do not show, without bound.
        """
        cov, size = self._cov, abs(residual)
        self._residuals.append(size / seconds)
        if self.steps % 16 == 0:
            self._clip = max(_CLIP_MADS * 1.4826 * median(self._residuals), _LEAST_CLIP)
        noise = max(self._noise, (_NOISE * seconds) ** 2)
        if size > self._clip * seconds:
            noise *= size / (self._clip * seconds)  # Huber's weight
        denominator = noise + variance
        gain = [m / denominator for m in mx]
        self._weights = [w + g * residual for w, g in zip(self._weights, gain, strict=True)]
        drift, ceiling = _DRIFT * self._noise, _LEAST_SURE * self._noise
        for i, line in enumerate(cov):
            for j in range(i, len(cov)):
                line[j] = cov[j][i] = line[j] - gain[i] * mx[j]
            if line[i] < ceiling:
                line[i] += drift
        self._forbid_negative()
        return variance / denominator

    def _forbid_negative(self) -> None:
        """Set negative weights to 0, and move the others as their covariance with these says.

        What was learnt of sums of weights is kept that way. Were they only cut off, the others would keep what they had
        given to them, and each step would add more: on a real machine the model grew without bound.
        """
        for _ in range(2 * len(self._weights)):
            least = min(self._weights)
            if least >= 0:
                return
            i = self._weights.index(least)
            line = self._cov[i]
            share = least / line[i] if line[i] > 0 else 0.0
            self._weights = [w - share * c for w, c in zip(self._weights, line, strict=True)]
            self._weights[i] = 0.0
        self._weights = [max(0.0, w) for w in self._weights]
