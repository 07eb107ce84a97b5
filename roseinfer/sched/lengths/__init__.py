"""Estimates of output lengths behind one protocol."""

from collections.abc import Callable

from roseinfer.sched.lengths.base import LengthEstimator
from roseinfer.sched.lengths.ecdf import EcdfLengths
from roseinfer.sched.lengths.oracle import OracleLengths
from roseinfer.sched.lengths.predicted import PredictedLengths

_KINDS: dict[str, Callable[[], LengthEstimator]] = {
    "classifier": lambda: PredictedLengths(EcdfLengths()),
    "ecdf": EcdfLengths,
    "oracle": OracleLengths,
}
LENGTH_ESTIMATORS = tuple(_KINDS)


def make_lengths(kind: str) -> LengthEstimator:
    """The estimator that the option `length_estimator` names.

    `classifier` takes the predictions that requests bring (`roseinfer.predictor` makes them, where requests are
    received), and the table of `ecdf` for requests without one.
    """
    return _KINDS[kind]()
