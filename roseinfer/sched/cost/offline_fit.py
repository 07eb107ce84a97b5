"""Offline fit of the cost model to recorded steps: robust least squares.

Errors are relative to a step's predicted time, so that short decoding steps weigh as much as long prompts. No constant
may be negative; with six or seven constants, trying every subset finds the best non-negative solution.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median
from typing import NamedTuple

from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import WHOLE_CONTEXT, ContextReads, ExpertChoice
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.params import CostParams, Work

MIN_SAMPLES = 16
_REWEIGHTINGS_COUNT = 20

_MAX_HUBER_DEVIATIONS = 1.5  # a larger error counts linearly
_MIN_OUTLIER_DEVIATIONS, _MIN_OUTLIER_SHARE = 3.0, 0.10  # both must be exceeded
_MIN_PIVOT = 1e-8  # of columns scaled to 1; below it, a column is a combination of the others


class CostSample(NamedTuple):
    """A measured step."""

    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants and their errors, relative to the measured time.

    `r2`, `mape` and `worst` exclude outliers, `worst_of_all` includes them. Both worst errors are signed: positive if
    the model predicts too much.
    """

    params: CostParams
    samples: int
    outliers: int
    r2: float
    mape: float
    worst: float
    worst_of_all: float


def fit_cost(
    samples: Iterable[CostSample],
    experts: ExpertChoice | None = None,
    reads: ContextReads = WHOLE_CONTEXT,
) -> Fit:
    """Fit by iteratively reweighted (Huber) least squares, then once more without outliers.

    `experts`, `reads`: of the model that ran the steps. Steps with drafts only show what these add: a fit of its own,
    to what is left of their time. Raise `ConfigError` for too few samples.
    """
    shape = CostParams(experts=experts, reads=reads)
    measured = [sample for sample in samples if sample.seconds > 0]
    used = [sample for sample in measured if not sample.work.has_drafts]
    if len(used) < MIN_SAMPLES:
        raise ConfigError(f"{len(used)} measured steps are too few to fit a cost model: {MIN_SAMPLES} at least")
    rows, seconds = [shape.features(sample.work) for sample in used], [sample.seconds for sample in used]
    middle = median(seconds)
    # In the first round, a step measured too short must not weigh more for it.
    scales, weights = [max(own, middle / 2) for own in seconds], [1.0] * len(used)
    for _ in range(_REWEIGHTINGS_COUNT):
        constants = _non_negative(rows, seconds, [w / own**2 for w, own in zip(weights, scales, strict=True)])
        scales = [max(own, middle / 100) for own in _predictions(rows, constants)]
        errors = _errors(rows, seconds, scales, constants)
        bound = _MAX_HUBER_DEVIATIONS * _deviation(errors)
        weights = [1.0 if abs(error) <= bound else bound / abs(error) for error in errors]
    limit = max(_MIN_OUTLIER_DEVIATIONS * _deviation(errors), _MIN_OUTLIER_SHARE)
    kept = [number for number, error in enumerate(errors) if abs(error) <= limit]
    if len(kept) >= MIN_SAMPLES:
        inside = [weights[i] / scales[i] ** 2 for i in kept]
        constants = _non_negative([rows[i] for i in kept], [seconds[i] for i in kept], inside)
    else:
        kept = list(range(len(rows)))
    params = shape.with_values(constants)
    drafted = [sample for sample in measured if sample.work.has_drafts]
    if len(drafted) >= MIN_SAMPLES:
        params = replace(params, drafts=_fit_drafts(params, drafted))
    return _judged(params, used, kept)


def _fit_drafts(params: CostParams, samples: Sequence[CostSample]) -> DraftCost:
    rows = [sample.work.draft_features for sample in samples]
    left = [sample.seconds - params.seconds(sample.work) + params.drafts_s(sample.work) for sample in samples]
    return DraftCost(*_non_negative(rows, left, [1 / sample.seconds**2 for sample in samples]))


def _judged(params: CostParams, used: Sequence[CostSample], kept: Sequence[int]) -> Fit:
    relative = [params.seconds(sample.work) / sample.seconds - 1 for sample in used]
    measured = [used[i].seconds for i in kept]
    mean = fmean(measured)
    total = sum((seconds - mean) ** 2 for seconds in measured)
    unexplained = sum((used[i].seconds - params.seconds(used[i].work)) ** 2 for i in kept)
    return Fit(
        params,
        samples=len(used),
        outliers=len(used) - len(kept),
        r2=1 - unexplained / total if total else 0.0,
        mape=fmean(abs(relative[i]) for i in kept),
        worst=max((relative[i] for i in kept), key=abs),
        worst_of_all=max(relative, key=abs),
    )


def _predictions(rows: Sequence[Sequence[float]], constants: Sequence[float]) -> list[float]:
    return [sum([c * f for c, f in zip(constants, row, strict=True)]) for row in rows]


def _errors(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], scales: Sequence[float], constants: Sequence[float]
) -> list[float]:
    """Return errors relative to the predicted time, so that noise does not pull the prediction down."""
    predicted = _predictions(rows, constants)
    return [(own - prediction) / scale for own, prediction, scale in zip(seconds, predicted, scales, strict=True)]


def _deviation(errors: Sequence[float]) -> float:
    """Estimate the standard deviation of a normal law from the median absolute deviation."""
    return max(1.4826 * median(map(abs, errors)), 1e-9)


def _non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the x >= 0 with the least sum of weight * (row . x - seconds)^2, trying each subset of the columns."""
    weighted = [[w * f for f in row] for w, row in zip(weights, rows, strict=True)]
    columns, across = list(zip(*rows, strict=True)), list(zip(*weighted, strict=True))
    scales = [_dot(column, other) ** 0.5 for column, other in zip(columns, across, strict=True)]
    used = [i for i, scale in enumerate(scales) if scale > 0]
    gram = {(i, j): _dot(columns[i], across[j]) / (scales[i] * scales[j]) for i in used for j in used}
    aim = {i: _dot(across[i], seconds) / scales[i] for i in used}
    best, best_gain = [0.0] * len(rows[0]), 0.0
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            solved = _solve([[gram[i, j] for j in subset] for i in subset], [aim[i] for i in subset])
            if solved is None or min(solved) < 0:
                continue
            gain = sum(s * aim[i] for s, i in zip(solved, subset, strict=True))
            if gain > best_gain * (1 + 1e-12):
                best_gain, best = gain, [0.0] * len(rows[0])
                for s, i in zip(solved, subset, strict=True):
                    best[i] = s / scales[i]
    return best


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum([x * y for x, y in zip(a, b, strict=True)])


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve by Cholesky factorisation for a symmetric matrix with a diagonal of 1; None if it is nearly singular."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i != j:
                lower[i][j] = rest / lower[j][j]
            elif rest < _MIN_PIVOT:
                return None
            else:
                lower[i][i] = rest**0.5
    half = [0.0] * size
    for i in range(size):
        half[i] = (right[i] - sum(lower[i][k] * half[k] for k in range(i))) / lower[i][i]
    solved = [0.0] * size
    for i in reversed(range(size)):
        solved[i] = (half[i] - sum(lower[k][i] * solved[k] for k in range(i + 1, size))) / lower[i][i]
    return solved
