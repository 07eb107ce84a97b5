"""Metrics of length predictions: the figures that SCORPIO reports for its predictor."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True)
class PredictionMetrics:
    """Kendall's tau-b; shares in the right bucket and at most one and two beside it; root mean square error, tokens.

    `rmse_constant`: of always saying the mean.
    """

    rows: int
    tau: float
    exact: float
    within_1: float
    within_2: float
    rmse: float
    rmse_constant: float


def judge(predicted: ArrayLike, true: ArrayLike, width: float, buckets: int) -> PredictionMetrics:
    """Compute the metrics of predictions and lengths, both [n] in tokens."""
    guess, truth = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    off = np.abs(bucket_of(guess, width, buckets) - bucket_of(truth, width, buckets))
    return PredictionMetrics(
        rows=len(truth),
        tau=kendall_tau(guess, truth),
        exact=float(np.mean(off == 0)),
        within_1=float(np.mean(off <= 1)),
        within_2=float(np.mean(off <= 2)),
        rmse=float(np.sqrt(np.mean((guess - truth) ** 2))),
        rmse_constant=float(np.std(truth)),
    )


def bucket_of(lengths: ArrayLike, width: float, buckets: int) -> NDArray[np.int64]:
    """Return the bucket of each length: b holds b * width < length <= (b + 1) * width, the last also longer ones."""
    found = np.ceil(np.asarray(lengths, dtype=np.float64) / width) - 1
    return np.clip(found, 0, buckets - 1).astype(np.int64)


def kendall_tau(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return Kendall's tau-b, which discounts ties; 0 if one of the two never varies."""
    agree, differ_a, differ_b = 0, 0, 0
    for i in range(len(a) - 1):
        sign_a, sign_b = np.sign(a[i + 1 :] - a[i]), np.sign(b[i + 1 :] - b[i])
        agree += int(sign_a @ sign_b)
        differ_a += int(np.count_nonzero(sign_a))
        differ_b += int(np.count_nonzero(sign_b))
    return agree / (differ_a * differ_b) ** 0.5 if differ_a and differ_b else 0.0
