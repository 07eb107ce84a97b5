"""The figures of a predictor, on small cases worked out by hand."""

import random

import numpy as np
import pytest

from roseinfer.predictor.metrics import bucket_of, judge, kendall_tau


def tau(a: list[float], b: list[float]) -> float:
    return kendall_tau(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64))


def test_kendall_tau() -> None:
    assert tau([1, 2, 3], [10, 20, 30]) == 1
    assert tau([1, 2, 3], [3, 2, 1]) == -1
    assert tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / (2 * 3) ** 0.5), "a tie in one of them"
    assert tau([5, 5, 5], [1, 2, 3]) == 0


def test_kendall_tau_of_what_is_not_related() -> None:
    rng = random.Random(0)
    assert abs(tau([rng.random() for _ in range(1000)], [rng.random() for _ in range(1000)])) < 0.06


def test_buckets() -> None:
    assert bucket_of([1, 10, 11, 20, 1000, 5000], 10, 100).tolist() == [0, 0, 1, 1, 99, 99]


def test_figures() -> None:
    found = judge([5, 15, 25, 95], [5, 25, 45, 95], width=10, buckets=10)
    assert (found.rows, found.exact, found.within_1, found.within_2) == (4, 0.5, 0.75, 1.0)
    assert found.rmse == pytest.approx((500 / 4) ** 0.5)
    assert found.rmse_constant == pytest.approx(np.std([5, 25, 45, 95]))
    assert found.tau == 1
