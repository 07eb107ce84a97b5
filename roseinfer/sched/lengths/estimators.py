"""How long outputs will be: estimates behind one protocol, and the peak of the KV cache if they are right."""

import random
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from typing import Protocol

from roseinfer.core.request import Request, Status
from roseinfer.sched.lengths.predictions import LengthPair, SourceRecord, SourceRecords, middle_of

SIZE = 4000
_START = [16 + round(i * (1023 - 16) / 31) for i in range(32)]
MIN_LEFT = 8.0
_FEW = 2  # requests like one, of which two are only believed in
_UNKNOWN = 0.5  # requests, among those like it, of which a prediction said nothing
_LARGEST = 16  # times `max_tokens`
_STALE = 1 / 16  # of a record: how many end between two looks at those that run
_LEAST_TIDY = 64


class LengthEstimator(Protocol):
    @property
    def usual(self) -> float:
        """Output tokens expected of a request that nobody has guessed anything of; 0 = unknown."""
        ...

    def total(self, request: Request) -> float:
        """Output tokens expected of a request that has none."""
        ...

    def left(self, request: Request, outputs: int) -> float:
        """Output tokens expected beyond the first `outputs` (>= 1) of a request that goes on."""
        ...

    def finished(self, request: Request, outputs: int) -> None:
        """Learn from a request that came to its own end."""
        ...

    def known(self, request: Request) -> bool:
        """Whether enough requests of its source have ended to tell what its prediction is worth."""
        ...


class EcdfLengths:
    """Without a predictor: the lengths of the outputs that have ended, one table for all.

    Quartiles of a sorted table; it starts with 32 lengths spread over 16..1023 and drops random ones when full."""

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

    def left(self, request: Request, outputs: int) -> float:
        found = self._left.get(outputs)
        if found is None:
            found = self._left[outputs] = self._conditional(outputs)
        return max(1.0, min(found, request.params.max_tokens - outputs))

    def share_above(self, outputs: int) -> float:
        """Of the requests: how many have longer outputs; never nobody."""
        return (len(self._table) - bisect_right(self._table, outputs) + 1) / (len(self._table) + 1)

    def finished(self, request: Request, outputs: int) -> None:
        if len(self._table) >= SIZE:
            self._table.pop(self._rng.randrange(len(self._table)))
        insort(self._table, outputs)
        self._refresh()

    def known(self, request: Request) -> bool:
        """Predictions count for nothing."""
        return True

    def _refresh(self) -> None:
        q25, q50, q75 = self._quartiles(0)
        self._total = q25 / 4 + q50 / 2 + q75 / 4
        self._left.clear()

    def _conditional(self, outputs: int) -> float:
        above = bisect_right(self._table, outputs)
        if len(self._table) - above < 3:
            return max(0.3 * outputs, 32.0)
        return max(sum(self._quartiles(above)) / 3 - outputs, MIN_LEFT)

    def _quartiles(self, first: int) -> tuple[int, int, int]:
        table, span = self._table, len(self._table) - first - 1
        return table[first + span // 4], table[first + span // 2], table[first + 3 * span // 4]


class OracleLengths:
    """True lengths, from a trace: what a perfect predictor would be worth.

    Trusts `predicted_len` to the token, up to the request's `max_tokens`; without one, it is these.
    """

    usual = 0.0

    def total(self, request: Request) -> float:
        most = request.params.max_tokens
        return float(min(request.predicted_len or most, most))

    def left(self, request: Request, outputs: int) -> float:
        return max(1.0, self.total(request) - outputs)

    def finished(self, request: Request, outputs: int) -> None:
        """Nothing to learn."""

    def known(self, request: Request) -> bool:
        return True


class CalibratedLengths:
    """Predictions that come with requests, as far as those of the same source proved right (`predictions.py`);
    requests without one are estimated as `otherwise` does. In all it is no less than `min_tokens`.

    A request that nothing but `max_tokens` can end needs no prediction, and says nothing of others.
    """

    def __init__(self, otherwise: EcdfLengths) -> None:
        self._otherwise = otherwise
        self._records = SourceRecords()
        self._live: dict[str, Request] = {}  # those that were asked for, and may have ended otherwise
        self._tidy_at = _LEAST_TIDY
        self._ended = 0

    @property
    def usual(self) -> float:
        return self._otherwise.usual

    def total(self, request: Request) -> float:
        most = max(1, request.params.max_tokens)
        if runs_to_its_limit(request):
            return float(most)
        if request.predicted_len is None:
            return self._otherwise.total(request)
        self._watch(request)
        return max(1.0, request.params.min_tokens, min(self._record(request).expected(said(request)), most))

    def left(self, request: Request, outputs: int) -> float:
        params = request.params
        most = max(1, params.max_tokens - outputs)
        if params.ignore_eos and runs_to_its_limit(request):
            return float(most)
        if request.predicted_len is None:
            return self._otherwise.left(request, outputs)
        return float(min(max(self._beyond(request, outputs), MIN_LEFT), most))

    def finished(self, request: Request, outputs: int) -> None:
        self._live.pop(request.request_id, None)
        if runs_to_its_limit(request):
            return
        self._otherwise.finished(request, outputs)
        if request.predicted_len is None:
            return
        actual = float(outputs)
        if outputs >= request.params.max_tokens:
            if outputs < self._record(request).expected(said(request)):
                return  # cut off where it was expected to go on: nothing new
            actual += self._beyond(request, outputs)
        self._records.add(request.hinted, request.tenant, said(request), actual)
        self._ended += 1
        if self._ended > _STALE * len(self._record(request)):
            self._ended = 0
            self._see_running()

    def known(self, request: Request) -> bool:
        """Whether enough requests of its source have ended to tell what its prediction is worth."""
        return self._records.known(request.hinted, request.tenant)

    def _record(self, request: Request) -> SourceRecord:
        return self._records.of(request.hinted, request.tenant)

    def _beyond(self, request: Request, outputs: int) -> float:
        """As of those like it that got so far; if these are few, it may also be one of which nothing was known."""
        length, residuals = self._record(request).residuals(said(request))
        first = bisect_right(residuals, outputs - length)
        count = len(residuals) - first
        longer = length + middle_of(residuals, first) - outputs if count else 0.0
        if count > _FEW:
            return longer
        unknown = _UNKNOWN * self._otherwise.share_above(outputs)
        return (count * longer + unknown * self._otherwise.left(request, outputs)) / (count + unknown)

    def _watch(self, request: Request) -> None:
        self._live[request.request_id] = request
        if len(self._live) > self._tidy_at:
            self._tidy()

    def _tidy(self) -> None:
        self._live = {name: one for name, one in self._live.items() if one.status is not Status.FINISHED}
        self._tidy_at = 2 * len(self._live) + _LEAST_TIDY

    def _see_running(self) -> None:
        self._tidy()
        running = [one for one in self._live.values() if one.num_outputs]
        self._records.see_running([(one.hinted, one.tenant, LengthPair(said(one), one.num_outputs)) for one in running])


def said(request: Request) -> float:
    """What was predicted, at least 1, and not so much that one request would outweigh all others."""
    return float(max(1, min(request.predicted_len or 1, _LARGEST * max(1, request.params.max_tokens))))


def runs_to_its_limit(request: Request) -> bool:
    """Whether its output has `max_tokens` tokens, come what may (an abort apart)."""
    params = request.params
    return params.ignore_eos and not request.stop_ids and not params.stop


_KINDS: dict[str, Callable[[], LengthEstimator]] = {
    "classifier": lambda: CalibratedLengths(EcdfLengths()),
    "ecdf": EcdfLengths,
    "oracle": OracleLengths,
}
LENGTH_ESTIMATORS = tuple(_KINDS)


def make_lengths(kind: str) -> LengthEstimator:
    """The estimator that the option `length_estimator` names.

    `classifier` takes the predictions that requests bring (`roseinfer.predictor` makes them, where requests are
    received) for what they proved worth, and the table of `ecdf` for requests without one.
    """
    return _KINDS[kind]()


def peak_tokens(rows: Iterable[tuple[float, float]]) -> float:
    """`rows`: (tokens held now, tokens still to come) of each request, all growing at the same pace.

    When the i-th longest-lived leaves, those at least as long-lived hold what they hold now and what has come since;
    the peak is the largest such sum (LightLLM's estimate).
    """
    held, peak = 0.0, 0.0
    for count, (used, left) in enumerate(sorted(rows, key=lambda row: -row[1]), 1):
        held += used
        peak = max(peak, held + left * count)
    return peak
