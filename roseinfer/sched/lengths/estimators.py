"""Length estimators: how many tokens outputs will have, and the resulting peak of the KV cache."""

import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from math import inf
from operator import itemgetter
from typing import Protocol

from roseinfer.core.request import Request, Status
from roseinfer.sched.lengths.predictions import LengthPair, SourceRecord, SourceRecords, middle_of

MAX_LENGTHS = 4000
_START = [16 + round(i * (1023 - 16) / 31) for i in range(32)]
MIN_LEFT_TOKENS = 8.0
_MIN_ALIKE = 2  # similar requests; the prior always contributes two
_PRIOR_SHARE = 0.5  # weight of the fallback estimate, in similar requests
_MAX_PREDICTION_RATIO = 16  # of a prediction to `max_tokens`
_REFRESH_SHARE = 1 / 16  # share of a record that may end before running requests are counted again
_MIN_CLEANUP_COUNT = 64
_MIN_CONDITIONAL_COUNT = 3  # longer outputs, for an estimate from them


class LengthEstimator(Protocol):
    @property
    def usual(self) -> float:
        """Output tokens expected of a request without any prediction; 0 = unknown."""
        ...

    def total(self, request: Request) -> float:
        """Return the output tokens expected of a request that has none yet."""
        ...

    def left(self, request: Request, outputs: int, share: float | None = None) -> float:
        """Return the tokens after the first `outputs` (>= 1) of a running request: the expected ones or, with a
        `share`, those that this share of similar requests do not exceed.
        """
        ...

    def finished(self, request: Request, outputs: int) -> None:
        """Learn from a request that ended by itself."""
        ...


class EcdfLengths:
    """Estimates without predictions, from one table of the lengths of all outputs that have ended.

    The estimates are quartiles of the sorted table. It starts with 32 lengths spread over 16..1023 and drops random
    lengths when it is full.
    """

    def __init__(self, seed: int = 0) -> None:
        self._table = list(_START)
        self._rng = random.Random(seed)
        self._total = 0.0
        self._left: dict[int, float] = {}
        self._refresh()

    @property
    def usual(self) -> float:
        return self._total

    def total(self, request: Request) -> float:
        return min(self._total, float(request.params.max_tokens))

    def left(self, request: Request, outputs: int, share: float | None = None) -> float:
        if share is not None:
            above = bisect_right(self._table, outputs)
            count = len(self._table) - above
            if count >= _MIN_CONDITIONAL_COUNT:
                return max(1.0, min(self._table[above + int(share * count)], request.params.max_tokens) - outputs)
        found = self._left.get(outputs)
        if found is None:
            found = self._left[outputs] = self._conditional(outputs)
        return max(1.0, min(found, request.params.max_tokens - outputs))

    def share_above(self, outputs: int) -> float:
        """Return the share of requests with longer outputs, always above 0."""
        return (len(self._table) - bisect_right(self._table, outputs) + 1) / (len(self._table) + 1)

    def finished(self, request: Request, outputs: int) -> None:
        if len(self._table) >= MAX_LENGTHS:
            self._table.pop(self._rng.randrange(len(self._table)))
        insort(self._table, outputs)
        self._refresh()

    def _refresh(self) -> None:
        q25, q50, q75 = self._quartiles(0)
        self._total = q25 / 4 + q50 / 2 + q75 / 4
        self._left.clear()

    def _conditional(self, outputs: int) -> float:
        above = bisect_right(self._table, outputs)
        if len(self._table) - above < _MIN_CONDITIONAL_COUNT:
            return max(0.3 * outputs, 32.0)
        return max(sum(self._quartiles(above)) / 3 - outputs, MIN_LEFT_TOKENS)

    def _quartiles(self, first: int) -> tuple[int, int, int]:
        table, span = self._table, len(self._table) - first - 1
        return table[first + span // 4], table[first + span // 2], table[first + 3 * span // 4]


class OracleLengths:
    """True lengths from a trace, to measure the value of a perfect predictor.

    The length is `predicted_len`, at most `max_tokens`; without a prediction it is `max_tokens`.
    """

    usual = 0.0

    def total(self, request: Request) -> float:
        limit = request.params.max_tokens
        return float(min(request.predicted_len or limit, limit))

    def left(self, request: Request, outputs: int, share: float | None = None) -> float:
        return max(1.0, self.total(request) - outputs)

    def finished(self, request: Request, outputs: int) -> None:
        """Ignore the request: there is nothing to learn."""


class CalibratedLengths:
    """Estimates from predictions that come with requests, corrected by the source's record (`predictions.py`).

    `fallback` estimates requests without a prediction. No estimate is below `min_tokens`. A request that only
    `max_tokens` can end needs no prediction and is not learnt from.
    """

    def __init__(self, fallback: EcdfLengths) -> None:
        self._fallback = fallback
        self._records = SourceRecords()
        self._live: dict[str, Request] = {}  # estimated; some may have ended without `finished`
        self._cleanup_at = _MIN_CLEANUP_COUNT
        self._ended = 0

    @property
    def usual(self) -> float:
        return self._fallback.usual

    def total(self, request: Request) -> float:
        limit = max(1, request.params.max_tokens)
        if runs_to_its_limit(request):
            return float(limit)
        if request.predicted_len is None:
            return self._fallback.total(request)
        self._watch(request)
        return max(
            1.0, request.params.min_tokens, min(self._record(request).expected(predicted_tokens(request)), limit)
        )

    def left(self, request: Request, outputs: int, share: float | None = None) -> float:
        params = request.params
        limit = max(1, params.max_tokens - outputs)
        if params.ignore_eos and runs_to_its_limit(request):
            return float(limit)
        if request.predicted_len is None:
            return self._fallback.left(request, outputs, share)
        return float(min(max(self._left_of_alike(request, outputs, share), MIN_LEFT_TOKENS), limit))

    def finished(self, request: Request, outputs: int) -> None:
        self._live.pop(request.request_id, None)
        if runs_to_its_limit(request):
            return
        self._fallback.finished(request, outputs)
        if request.predicted_len is None:
            return
        actual = float(outputs)
        if outputs >= request.params.max_tokens:
            if outputs < self._record(request).expected(predicted_tokens(request)):
                return  # cut off before its expected end: nothing to learn
            actual += self._left_of_alike(request, outputs, None)
        self._records.add(request.hinted, request.tenant, predicted_tokens(request), actual)
        self._ended += 1
        if self._ended > _REFRESH_SHARE * len(self._record(request)):
            self._ended = 0
            self._see_running()

    def _record(self, request: Request) -> SourceRecord:
        return self._records.of(request.hinted, request.tenant)

    def _left_of_alike(self, request: Request, outputs: int, share: float | None) -> float:
        """Return the tokens left, from requests with similar predictions that got as far: the expected ones, or those
        that `share` of the requests do not exceed. If these are few, the fallback estimate counts as well.
        """
        length, residuals = self._record(request).residuals(predicted_tokens(request))
        first = bisect_right(residuals, outputs - length)
        count = len(residuals) - first
        longer = 0.0
        if count:
            residual = middle_of(residuals, first) if share is None else residuals[first + int(share * count)]
            longer = length + residual - outputs
        if count > _MIN_ALIKE:
            return longer
        unknown = _PRIOR_SHARE * self._fallback.share_above(outputs)
        return (count * longer + unknown * self._fallback.left(request, outputs, share)) / (count + unknown)

    def _watch(self, request: Request) -> None:
        self._live[request.request_id] = request
        if len(self._live) > self._cleanup_at:
            self._clean_up()

    def _clean_up(self) -> None:
        self._live = {name: one for name, one in self._live.items() if one.status is not Status.FINISHED}
        self._cleanup_at = 2 * len(self._live) + _MIN_CLEANUP_COUNT

    def _see_running(self) -> None:
        self._clean_up()
        running = [one for one in self._live.values() if one.num_outputs]
        self._records.see_running(
            [(one.hinted, one.tenant, LengthPair(predicted_tokens(one), one.num_outputs)) for one in running]
        )


def predicted_tokens(request: Request) -> float:
    """Return the prediction, at least 1, and bounded so that one request cannot outweigh all others."""
    return float(max(1, min(request.predicted_len or 1, _MAX_PREDICTION_RATIO * max(1, request.params.max_tokens))))


def runs_to_its_limit(request: Request) -> bool:
    """True if the output always has `max_tokens` tokens, unless it is aborted."""
    params = request.params
    return params.ignore_eos and not request.stop_ids and not params.stop


_KINDS: dict[str, Callable[[], LengthEstimator]] = {
    "classifier": lambda: CalibratedLengths(EcdfLengths()),
    "ecdf": EcdfLengths,
    "oracle": OracleLengths,
}
LENGTH_ESTIMATORS = tuple(_KINDS)


def make_lengths(kind: str) -> LengthEstimator:
    """Return the estimator that the option `length_estimator` names.

    `classifier` corrects the predictions that come with requests (`roseinfer.predictor` makes them where requests are
    received) by their past errors, and uses the table of `ecdf` for requests without one.
    """
    return _KINDS[kind]()


def peak_tokens(rows: Iterable[tuple[float, float]], window: float = inf) -> float:
    """Return the peak of held tokens while requests grow at the same pace; `rows` are (tokens held, tokens to come).

    When the i-th longest-lived request ends, it and all that live longer hold their present tokens plus as many new
    ones each. The peak is the largest such sum (LightLLM's estimate). `window`: most tokens that each of them holds.
    """
    if window < inf:
        rows = [(min(used, window), max(0.0, min(left, window - used))) for used, left in rows]
    held, peak = 0.0, 0.0
    for count, (used, left) in enumerate(sorted(rows, key=itemgetter(1), reverse=True), 1):
        held += used
        peak = max(peak, held + left * count)
    return peak
