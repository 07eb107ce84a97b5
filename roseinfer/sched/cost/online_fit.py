"""Online fit of the cost model: the constants of `params.py`, fitted to each step as it is measured.

    seconds = rho * (c0 + cp * Np + ca * X + cd * Nd + ck * K + cb * B + ce * R)

Recursive least squares fit the shape. `rho` follows the present speed, and a change above the noise within 4 steps
(`SpeedTracker`). A step that verifies or makes drafts teaches only what these add to it (`drafts.py`): a second fit, of
what is left of its time. The constants above would drift to explain it.
"""

from collections import deque
from dataclasses import replace

from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.least_squares import LeastSquares
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.cost.speed import SpeedTracker, StallDetector, StallStats

# Scales of the features, so that those of a busy step are about 1. The feature of experts is scaled by their number.
_SCALES = (1.0, 512.0, 131_072.0, 64.0, 32_768.0, 16_384.0)
_MAX_SPREAD_SHARE = 0.2  # relative standard deviation of a prediction up to which a much longer step is a stall
_DRAFT_SCALES = (1.0, 8.0, 64.0, 128.0, 65_536.0, 4.0, 64.0)  # the same for features of drafts
_MIN_STEP_S, _MIN_TOKEN_S = 1e-6, 1e-8  # above 0, since policies divide by them


class CostModel:
    """Cost model that learns from measured steps. `params` is the present estimate, including `rho`.

    `steps`: number of observed steps without drafts; `draft_steps`: with drafts. `predicted_s`: prediction for the
    newest step before it was learnt from; 0 = none. A step that takes far longer than the steps around it is a stall:
    it is counted (`stalls`) and not learnt from. `trust`: standard deviation of the initial estimate, relative to a
    step.
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
        weights = [value * scale for value, scale in zip(start.values(), self._scales, strict=True)]
        self._shape = LeastSquares(weights, trust * sum(weights), sum(weights))
        self._drafts: LeastSquares | None = None  # set by the first step with drafts
        self.steps = self.draft_steps = 0
        self.predicted_s = 0.0

    @property
    def rho(self) -> float:
        return self._speed.rho

    @property
    def slowed(self) -> float:
        """Present time of a step as a multiple of its time over the last hundred steps; at least 1."""
        return max(1.0, self._speed.rho / self._speed.lasting)

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
        self.predicted_s = max(self.params.seconds(work), _MIN_STEP_S)
        if work.has_drafts:
            self._learn_drafts(work, seconds)
            return
        self.steps += 1
        self.errors.append(seconds / self.predicted_s - 1)
        speed = self._speed
        ratio, counts = self._learn(work, seconds, seconds / speed.level)
        if speed.observe(ratio, self._shape.clip if counts else 0.0):
            self._stalls.retract()
        scaled = [speed.rho * w / scale for w, scale in zip(self._shape.weights, self._scales, strict=True)]
        scaled[0], scaled[1] = max(scaled[0], _MIN_STEP_S), max(scaled[1], _MIN_TOKEN_S)
        self.params = self.params.with_values(scaled)

    def _learn(self, work: Work, seconds: float, unit_s: float) -> tuple[float, bool]:
        """Fit the shape to a step of `unit_s` seconds at the present level.

        Return the ratio of `unit_s` to the new prediction, and True unless the step was a stall. As far as the fit
        absorbs the difference, the speed of the machine has not changed.
        """
        x = [f / scale for f, scale in zip(self.params.features(work), self._scales, strict=True)]
        mx, variance = self._shape.project(x)
        shape_s = max(self._shape.predict(x), _MIN_STEP_S)
        sure = variance < (_MAX_SPREAD_SHARE * shape_s) ** 2
        stalled = self._stalls.observe(seconds, self.predicted_s, sure=sure)
        if self._fit and not stalled:
            taken = self._shape.update(mx, variance, unit_s, unit_s - shape_s, self.steps)
            shape_s = max(shape_s + taken * (unit_s - shape_s), _MIN_STEP_S)
        return unit_s / shape_s, not stalled

    def _learn_drafts(self, work: Work, seconds: float) -> None:
        """Fit what drafts add to a step."""
        if not self._fit:
            return
        params, fit = self.params, self._drafts
        if fit is None:
            weights = [value * scale for value, scale in zip(params.draft_cost, _DRAFT_SCALES, strict=True)]
            fit = self._drafts = LeastSquares(weights, sum(weights), params.step_s)
        x = [f / scale for f, scale in zip(work.draft_features, _DRAFT_SCALES, strict=True)]
        self.draft_steps += 1
        rest_s = seconds - params.seconds(work) + params.drafts_s(work)
        fit.update(*fit.project(x), seconds, rest_s - fit.predict(x), self.draft_steps)
        learnt = DraftCost(*[w / scale for w, scale in zip(fit.weights, _DRAFT_SCALES, strict=True)])
        self.params = replace(params, drafts=learnt)
