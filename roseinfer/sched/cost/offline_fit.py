"""The cost model from measured steps, all at once: least squares that outliers do not move.

Errors count relative to a step's predicted time, so that the short steps of decoding weigh as much as long prompts. No
constant may be negative; with six or seven of them, the best non-negative solution is found by trying every subset.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import NamedTuple

from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import ExpertChoice
from roseinfer.sched.cost.params import CostParams, Work

LEAST_SAMPLES = 16
_ROUNDS = 20
_TO_SIGMA = 1.4826  # median absolute deviation -> standard deviation of a normal law
_HUBER = 1.5  # in deviations: beyond, an error counts linearly
_OUTLIER, _OUTLIER_AT_LEAST = 3.0, 0.10  # in deviations, and relative
_LEAST_PIVOT = 1e-8  # of columns scaled to 1: below, one is a combination of the others


class Sample(NamedTuple):
    """A step that was measured."""

    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`r2`, `mape` and `worst` are of the samples that are no outliers, `worst_of_all` of these too. Errors are
    relative to the measured time; the worst ones have their sign: positive if the model says more.
    """

    params: CostParams
    samples: int
    outliers: int
    r2: float
    mape: float
    worst: float
    worst_of_all: float


def fit_cost(samples: Iterable[Sample], experts: ExpertChoice | None = None) -> Fit:
    """Iteratively reweighted (Huber) least squares, then once more without outliers.

    `experts`: those of the model that took the steps. Steps that do what the model has no constant for are left out.
    Raises `ConfigError` for too few samples.
    """
    shape = CostParams(experts=experts)
    used = [sample for sample in samples if sample.seconds > 0 and sample.work.fits]
    if len(used) < LEAST_SAMPLES:
        raise ConfigError(f"{len(used)} measured steps are too few to fit a cost model: {LEAST_SAMPLES} at least")
    rows, seconds = [shape.features(sample.work) for sample in used], [sample.seconds for sample in used]
    middle = median(seconds)
    # To begin with, a step that is short by mistake must not weigh the more for it.
    scales, weights = [max(own, middle / 2) for own in seconds], [1.0] * len(used)
    for _ in range(_ROUNDS):
        constants = _non_negative(rows, seconds, [w / own**2 for w, own in zip(weights, scales, strict=True)])
        scales = [max(own, middle / 100) for own in _predictions(rows, constants)]
        errors = _errors(rows, seconds, scales, constants)
        bound = _HUBER * _deviation(errors)
        weights = [1.0 if abs(error) <= bound else bound / abs(error) for error in errors]
    limit = max(_OUTLIER * _deviation(errors), _OUTLIER_AT_LEAST)
    kept = [number for number, error in enumerate(errors) if abs(error) <= limit]
    if len(kept) >= LEAST_SAMPLES:
        inside = [weights[i] / scales[i] ** 2 for i in kept]
        constants = _non_negative([rows[i] for i in kept], [seconds[i] for i in kept], inside)
    else:
        kept = list(range(len(rows)))
    return _judged(shape.with_values(constants), used, kept)


def _judged(params: CostParams, used: Sequence[Sample], kept: Sequence[int]) -> Fit:
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
    """Relative to the predicted time, so that noise does not pull the prediction down."""
    said = _predictions(rows, constants)
    return [(own - guess) / scale for own, guess, scale in zip(seconds, said, scales, strict=True)]


def _deviation(errors: Sequence[float]) -> float:
    return max(_TO_SIGMA * median(map(abs, errors)), 1e-9)


def _non_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The x >= 0 with the least sum of weight * (row . x - seconds)^2: the best solution on a subset of the columns."""
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
    """Cholesky's way for a symmetric matrix with a diagonal of 1; None if it is singular or nearly so."""
    size = len(right)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i != j:
                lower[i][j] = rest / lower[j][j]
            elif rest < _LEAST_PIVOT:
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
