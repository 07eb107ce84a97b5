"""Recursive least squares with constants that are never negative, robust to outliers."""

from collections import deque
from collections.abc import Sequence
from statistics import median

_DRIFT_SHARE = 1e-6  # variance added per step, as a share of the noise: how fast the constants may change
_MAX_RESIDUAL_MADS = 3.0
_MIN_CLIP_SHARE = 0.01
_NOISE_SHARE = 0.03  # relative noise of a measured step
_MAX_VARIANCE_SHARE = 1.0  # limit of the added variance, as a share of the noise, for features that steps do not show
_CLIP_INTERVAL_STEPS = 16


class LeastSquares:
    """Fit of `weights` to measured steps. `spread`: standard deviation of the initial weights. `scale_s`: usual size of
    what is fitted, for the least noise. `clip`: larger residuals, relative to a step, count linearly.
    """

    def __init__(self, weights: Sequence[float], spread: float, scale_s: float) -> None:
        self.weights = list(weights)
        self.clip = float("inf")
        size = len(self.weights)
        variance = spread**2
        self._cov = [[variance if i == j else 0.0 for j in range(size)] for i in range(size)]
        self._noise = (_NOISE_SHARE * scale_s) ** 2
        self._residuals: deque[float] = deque(maxlen=64)

    def project(self, x: Sequence[float]) -> tuple[list[float], float]:
        """Return the features `x` of a step times the covariance, and the variance of its prediction."""
        shown = [(i, f) for i, f in enumerate(x) if f]  # in most steps there are no prompts
        mx = [sum([line[i] * f for i, f in shown]) for line in self._cov]
        return mx, sum([f * m for f, m in zip(x, mx, strict=True)])

    def predict(self, x: Sequence[float]) -> float:
        return sum([w * f for w, f in zip(self.weights, x, strict=True)])

    def update(self, mx: list[float], variance: float, seconds: float, residual: float, number: int) -> float:
        """Do step `number` of recursive least squares. A residual beyond 3 median deviations counts linearly.

        `mx`, `variance`: as of `project`. `seconds`: the whole step's, of which the noise is a share. Return the share
        of the residual that the fit absorbs.

        Forgetting adds a little variance per step instead of applying a factor. On a machine that does the same for
        hours, a factor would let rounding errors and the variance of unused features grow without bound.
        """
        cov, size = self._cov, abs(residual)
        self._residuals.append(size / seconds)
        if number % _CLIP_INTERVAL_STEPS == 0:
            self.clip = max(_MAX_RESIDUAL_MADS * 1.4826 * median(self._residuals), _MIN_CLIP_SHARE)
        noise = max(self._noise, (_NOISE_SHARE * seconds) ** 2)
        if size > self.clip * seconds:
            noise *= size / (self.clip * seconds)  # Huber's weight
        denominator = noise + variance
        gain = [m / denominator for m in mx]
        self.weights = [w + g * residual for w, g in zip(self.weights, gain, strict=True)]
        drift, ceiling = _DRIFT_SHARE * self._noise, _MAX_VARIANCE_SHARE * self._noise
        shown = [i for i, m in enumerate(mx) if m]
        for number, i in enumerate(shown):
            line = cov[i]
            for j in shown[number:]:
                line[j] = cov[j][i] = line[j] - gain[i] * mx[j]
        for i, line in enumerate(cov):
            if line[i] < ceiling:
                line[i] += drift
        self._forbid_negative()
        return variance / denominator

    def _forbid_negative(self) -> None:
        """Set negative weights to 0, and move the others according to their covariance with these.

        This keeps what was learnt about sums of weights. With a plain cut-off the other weights would stay too large
        and grow with each step; on a real machine the model grew without bound.
        """
        for _ in range(2 * len(self.weights)):
            least = min(self.weights)
            if least >= 0:
                return
            i = self.weights.index(least)
            line = self._cov[i]
            share = least / line[i] if line[i] > 0 else 0.0
            self.weights = [w - share * c for w, c in zip(self.weights, line, strict=True)]
            self.weights[i] = 0.0
        self.weights = [max(0.0, w) for w in self.weights]
