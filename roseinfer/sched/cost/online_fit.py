"""Online fit of the cost model: the constants of `params.py`, fitted to each step as it is measured.

    seconds = rho * (c0 + cp * Np + ca * X + cd * Nd + ck * K + cb * B + ce * R)

Recursive least squares fit the shape. `rho` follows the present speed, and a change above the noise within 4 steps
(`SpeedTracker`). Steps that verify drafts are left out: such a row is neither a prompt chunk nor a decode, and the
constants of these would drift to explain it.
"""

from collections import deque
from dataclasses import replace
from statistics import median

from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.cost.speed import SpeedTracker, StallDetector, StallStats

# Scales of the features, so that those of a busy step are about 1. The feature of experts is scaled by their number.
_SCALES = (1.0, 512.0, 131_072.0, 64.0, 32_768.0, 16_384.0)
_DRIFT_SHARE = 1e-6  # variance added per step, as a share of the noise: how fast the shape may change
_MAX_RESIDUAL_MADS = 3.0
_MIN_CLIP_SHARE = 0.01
_NOISE_SHARE = 0.03  # relative noise of a measured step
_MAX_VARIANCE_SHARE = 1.0  # limit of the added variance, as a share of the noise, for features that steps do not show
_MAX_SPREAD_SHARE = 0.2  # relative standard deviation of a prediction up to which a much longer step is a stall
_MIN_STEP_S, _MIN_TOKEN_S = 1e-6, 1e-8  # above 0, since policies divide by them


class CostModel:
    """Cost model that learns from measured steps. `params` is the present estimate, including `rho`.

    `steps`: number of observed steps. `predicted_s`: prediction for the newest of them before it was learnt from;
    0 = none. A step that takes far longer than the steps around it is a stall: it is counted (`stalls`) and not learnt
    from. `trust`: standard deviation of the initial estimate, relative to a step.
    """

    def __init__(self, params: CostParams | None = None, *, trust: float = 0.02, fit: bool = True) -> None:
        start = params or CostParams()
        self.params = start
        if start.token_s < _MIN_TOKEN_S:  # possible if experts explain all of the prompts' time
            self.params = replace(start, token_s=_MIN_TOKEN_S)
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
        self._noise = (_NOISE_SHARE * sum(self._weights)) ** 2
        self._residuals: deque[float] = deque(maxlen=64)
        self._clip = float("inf")
        self.steps = 0
        self.predicted_s = 0.0

    @property
    def rho(self) -> float:
        return self._speed.rho

    @property
    def stalls(self) -> StallStats:
        """Statistics of recent stalls."""
        return self._stalls.stats()

    def seconds(self, work: Work) -> float:
        return self.params.seconds(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from a step that took `seconds`. Leave out steps with compilation, capture or garbage collection."""
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
        scaled[0], scaled[1] = max(scaled[0], _MIN_STEP_S), max(scaled[1], _MIN_TOKEN_S)
        self.params = self.params.with_values(scaled)

    def _learn(self, work: Work, seconds: float, unit_s: float) -> tuple[float, bool]:
        """Fit the shape to a step of `unit_s` seconds at the present level.

        Return the ratio of `unit_s` to the new prediction, and True unless the step was a stall. As far as the fit
        absorbs the difference, the speed of the machine has not changed.
        """
        x = [f / scale for f, scale in zip(self.params.features(work), self._scales, strict=True)]
        shown = [(i, f) for i, f in enumerate(x) if f]  # in most steps there are no prompts
        mx = [sum([line[i] * f for i, f in shown]) for line in self._cov]
        variance = sum([f * m for f, m in zip(x, mx, strict=True)])
        shape_s = max(sum([w * f for w, f in zip(self._weights, x, strict=True)]), _MIN_STEP_S)
        sure = variance < (_MAX_SPREAD_SHARE * shape_s) ** 2
        stalled = self._stalls.observe(seconds, self.predicted_s, sure=sure)
        if self._fit and not stalled:
            taken = self._update(mx, variance, unit_s, unit_s - shape_s)
            shape_s = max(shape_s + taken * (unit_s - shape_s), _MIN_STEP_S)
        return unit_s / shape_s, not stalled

    def _update(self, mx: list[float], variance: float, seconds: float, residual: float) -> float:
        """Do one step of recursive least squares. A residual beyond 3 median deviations counts linearly.

        `mx`: the step's features times the covariance. `variance`: `mx` times the features again. Return the share of
        the residual that the fit absorbs.

        Forgetting adds a little variance per step instead of applying a factor. On a machine that does the same for
        hours, a factor would let rounding errors and the variance of unused features grow without bound.
        """
        cov, size = self._cov, abs(residual)
        self._residuals.append(size / seconds)
        if self.steps % 16 == 0:
            self._clip = max(_MAX_RESIDUAL_MADS * 1.4826 * median(self._residuals), _MIN_CLIP_SHARE)
        noise = max(self._noise, (_NOISE_SHARE * seconds) ** 2)
        if size > self._clip * seconds:
            noise *= size / (self._clip * seconds)  # Huber's weight
        denominator = noise + variance
        gain = [m / denominator for m in mx]
        self._weights = [w + g * residual for w, g in zip(self._weights, gain, strict=True)]
        drift, ceiling = _DRIFT_SHARE * self._noise, _MAX_VARIANCE_SHARE * self._noise
        for i, line in enumerate(cov):
            for j in range(i, len(cov)):
                line[j] = cov[j][i] = line[j] - gain[i] * mx[j]
            if line[i] < ceiling:
                line[i] += drift
        self._forbid_negative()
        return variance / denominator

    def _forbid_negative(self) -> None:
        """Set negative weights to 0, and move the others according to their covariance with these.

        This keeps what was learnt about sums of weights. With a plain cut-off the other weights would stay too large
        and grow with each step; on a real machine the model grew without bound.
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
