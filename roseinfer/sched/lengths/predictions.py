"""Records of how good predictions of output lengths were, by source: the server's predictor, or a tenant's clients."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from math import erfc, exp, log2, pi, sqrt
from typing import NamedTuple

MAX_RECORD_PAIRS = 256  # pairs of a source that are kept
MAX_TENANTS = 32  # with records
MIN_KNOWN_PAIRS = 24  # pairs after which a tenant is no newcomer
_NEAREST_SHARE = 1 / 6  # share of the record, closest to a prediction, that shows how wrong it may be
_OCTAVE_BUCKETS_COUNT = 4  # buckets of predictions per octave
_REFRESH_SHARE = 1 / 16  # share of the record that changes before its tables are made again
# Priors, as relative standard deviations: of lengths around their estimate (with the weight of two requests), of their
# mean, and of the slope; and residuals, as shares of the estimate.
_NOISE_SHARE, _NOISE_COUNT = 0.5, 2
_MEAN_SPREAD_SHARE, _SLOPE_SPREAD_SHARE = 0.25, 0.5
_RESIDUALS = (0.0, 0.0, 0.0, 0.0, 0.25, 1.0)
_MIN_VARIANCE_RATIO = 2.0  # of a deviation to the variance by chance, to be significant
_MIN_CENSORED_SHARE = 0.05  # share of similar requests that have ended, before a running one counts


class LengthPair(NamedTuple):
    """Predicted and actual output tokens of a request."""

    predicted: float
    actual: float


class WeightedMoments:
    """Weighted sums of pairs, each with the weight `share` * predicted.

    Long requests weigh more because they cost more, and under overload mostly short ones end.
    """

    __slots__ = ("w", "ww", "x", "xx", "xy", "y", "yy")

    def __init__(self, pairs: Iterable[tuple[LengthPair, float]] = ()) -> None:
        self.w = self.ww = self.x = self.y = self.xx = self.xy = self.yy = 0.0
        for pair, share in pairs:
            self.add(pair, share)

    def add(self, pair: LengthPair, share: float) -> None:
        x, y = pair
        w = share * x
        self.w += w
        self.ww += share * x * x
        self.x += w * x
        self.y += w * y
        self.xx += w * x * x
        self.xy += w * x * y
        self.yy += w * y * y

    def with_at_most_as_many(self, other: "WeightedMoments") -> "WeightedMoments":
        """Return the sum of both, with `other` scaled down to at most the weight of this one."""
        share, found = min(1.0, self.w / other.w) if other.w > 0 else 0.0, WeightedMoments()
        for name in self.__slots__:
            setattr(found, name, getattr(self, name) + share * getattr(other, name))
        return found


class SourceRecord:
    """The last 256 pairs of one source, and the length expected for a prediction.

    Expected is mean + slope * (predicted - mean prediction): weighted least squares, with a normal prior (ridge) around
    the expectation of `parent` or, without one, around predictions that are right. So predictions that are all ten
    times too high get the slope 0.1, noise gets the slope 0 (the mean), and predictions with an error are in between:
    they shrink towards the mean according to the error. Where pairs close to a prediction clearly deviate from this
    line, their mean is followed instead.

    Short outputs end first, so the ended outputs are too short on average. `see_running` corrects that with the
    requests that are still running.
    """

    def __init__(self, parent: "SourceRecord | None" = None) -> None:
        self._parent = parent
        self._newest: deque[LengthPair] = deque()
        self._sorted: list[LengthPair] = []
        self._ended = WeightedMoments()
        self._outlived = WeightedMoments()
        self._tables: dict[int, tuple[int, float, list[float]]] = {}  # bucket -> as of, shift, residuals
        self._centre = self._mean = self._spread = 0.0
        self._ended_bias = 0.0  # mean of expected minus actual length of the ended requests
        self._slope = 1.0
        self.seen = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, predicted: float, actual: float) -> None:
        """Add a request that ended by itself."""
        pair = LengthPair(predicted, actual)
        self._newest.append(pair)
        self._ended.add(pair, 1.0)
        insort(self._sorted, pair)
        if len(self._newest) > MAX_RECORD_PAIRS:
            oldest = self._newest.popleft()
            self._ended.add(oldest, -1.0)
            del self._sorted[bisect_left(self._sorted, oldest)]
        self.seen += 1
        if self.seen % MAX_RECORD_PAIRS == 0:  # so that rounding errors do not add up
            self._ended = WeightedMoments((pair, 1.0) for pair in self._newest)
        self._fit()

    def see_running(self, running: Iterable[LengthPair]) -> None:
        """Set the running requests of this source: predicted tokens and tokens so far, valid until the next call."""
        if self._sorted:
            self._outlived = WeightedMoments(self._stand_for(running))
            self._fit()

    def expected(self, predicted: float) -> float:
        """Return the output tokens expected for a prediction."""
        return max(1.0, self._fitted(predicted) + self._table(predicted)[0])

    def residuals(self, predicted: float) -> tuple[float, list[float]]:
        """Return a length and the sorted residuals of similar requests (tokens by which they were longer)."""
        return max(1.0, self._fitted(predicted)), self._table(predicted)[1]

    # --- the fitted line ----------------------------------------------------------------------------------------
    def _fitted(self, predicted: float) -> float:
        if not self._sorted:
            return predicted if self._parent is None else self._parent.expected(predicted)
        return self._mean + self._slope * (predicted - self._centre)

    def _fit(self) -> None:
        sums = self._ended.with_at_most_as_many(self._outlived)
        count = sums.w * sums.w / sums.ww if sums.ww > 0 else 1.0
        centre, mean = sums.x / sums.w, sums.y / sums.w
        sxx = count * max(0.0, sums.xx / sums.w - centre * centre)
        sxy = count * (sums.xy / sums.w - centre * mean)
        syy = count * max(0.0, sums.yy / sums.w - mean * mean)
        prior, slope = centre, 1.0
        if self._parent is not None:
            prior, slope = self._parent.expected(centre), self._parent._slope
        unexplained = max(0.0, syy - sxy * sxy / sxx) if sxx > 0 else syy
        prior_variance = (_NOISE_SHARE * min(prior, mean)) ** 2
        variance = (unexplained + _NOISE_COUNT * prior_variance) / (count + _NOISE_COUNT)
        weight = variance / (_MEAN_SPREAD_SHARE * prior) ** 2
        self._centre, self._mean = centre, (count * mean + weight * prior) / (count + weight)
        weight = variance / _SLOPE_SPREAD_SHARE**2
        self._slope = max(0.0, (sxy + weight * slope) / (sxx + weight))
        self._spread = sqrt(variance)
        centre, mean, slope = self._centre, self._mean, self._slope  # `_fitted` inline: this is done for each output
        errors = [mean + slope * (predicted - centre) - actual for predicted, actual in self._sorted]
        self._ended_bias = sum(errors) / len(errors)

    def _stand_for(self, running: Iterable[LengthPair]) -> Iterable[tuple[LengthPair, float]]:
        """Return the pairs, with shares, that running requests count as (see `censored`)."""
        for predicted, so_far in running:
            mean = max(1.0, self._fitted(predicted))
            spread = max(self._spread * sqrt(mean / max(1.0, self._mean)), 0.01 * mean)
            length, share = censored(so_far, mean, spread)
            if share > _MIN_CENSORED_SHARE:
                yield LengthPair(predicted, length), share

    # --- residuals ----------------------------------------------------------------------------------------------
    def _table(self, predicted: float) -> tuple[float, list[float]]:
        bucket = round(_OCTAVE_BUCKETS_COUNT * log2(max(1.0, predicted)))
        made, shift, residuals = self._tables.get(bucket, (-1, 0.0, []))
        if made < 0 or self.seen - made > _REFRESH_SHARE * len(self):
            shift, residuals = self._residuals(2.0 ** (bucket / _OCTAVE_BUCKETS_COUNT))
            self._tables[bucket] = self.seen, shift, residuals
        return shift, residuals

    def _residuals(self, predicted: float) -> tuple[float, list[float]]:
        """Return the mean and the list of residuals of the pairs closest to a prediction.

        The mean is 0 as far as chance, or the bias of all ended requests, explains it.
        """
        found = [actual - self._fitted(predicted) for predicted, actual in self._nearest(predicted)]
        count, shift = len(found), 0.0
        if count >= MIN_KNOWN_PAIRS:
            mean = sum(found) / count
            chance = sum([(value - mean) ** 2 for value in found]) / count**2
            off = mean + self._ended_bias
            if off * off > _MIN_VARIANCE_RATIO * chance:
                shift = off - _MIN_VARIANCE_RATIO * chance / off
        length = max(1.0, self._fitted(predicted))
        return shift, sorted([*found, *[length * share for share in _RESIDUALS]])

    def _nearest(self, predicted: float) -> Sequence[LengthPair]:
        pairs = self._sorted
        wanted = max(MIN_KNOWN_PAIRS, round(_NEAREST_SHARE * len(pairs)))
        if len(pairs) <= wanted:
            return pairs
        low = high = bisect_left(pairs, (predicted, 0.0))
        while high - low < wanted:
            if high >= len(pairs) or (low > 0 and predicted - pairs[low - 1][0] <= pairs[high][0] - predicted):
                low -= 1
            else:
                high += 1
        return pairs[low:high]


class SourceRecords:
    """Records of the server's predictor and of the latest tenants whose clients sent predictions.

    The prior of a new tenant is the record of all tenants' first requests.
    """

    def __init__(self) -> None:
        self._server = SourceRecord()
        self._newcomers = SourceRecord()
        self._tenants: dict[str, SourceRecord] = {}  # the latest one to end a request comes last

    def of(self, hinted: bool, tenant: str) -> SourceRecord:
        return self._tenants.get(tenant, self._newcomers) if hinted else self._server

    def add(self, hinted: bool, tenant: str, predicted: float, actual: float) -> None:
        """Add a request that ended by itself."""
        if not hinted:
            self._server.add(predicted, actual)
            return
        record = self._tenants.pop(tenant, None)
        if record is None:
            record = SourceRecord(self._newcomers)
            if len(self._tenants) >= MAX_TENANTS:
                del self._tenants[self._tenant_to_drop()]
        self._tenants[tenant] = record
        if record.seen < MIN_KNOWN_PAIRS:
            self._newcomers.add(predicted, actual)
        record.add(predicted, actual)

    def see_running(self, running: Iterable[tuple[bool, str, LengthPair]]) -> None:
        """Set all running requests: hinted, tenant, and predicted tokens with the tokens so far."""
        by_record: dict[SourceRecord, list[LengthPair]] = {
            record: [] for record in (self._server, *self._tenants.values())
        }
        for hinted, tenant, pair in running:
            by_record.setdefault(self.of(hinted, tenant), []).append(pair)
        for record, pairs in by_record.items():
            record.see_running(pairs)

    def _tenant_to_drop(self) -> str:
        """Return the tenant unseen for longest, preferring newcomers, so that new names displace no known tenant."""
        little = (name for name, record in self._tenants.items() if record.seen < MIN_KNOWN_PAIRS)
        return next(little, next(iter(self._tenants)))


def censored(so_far: float, mean: float, spread: float) -> tuple[float, float]:
    """Return the length, and the share of an ended request, that a running request with `so_far` tokens counts as.

    Lengths are assumed normal (`mean`, `spread`) but positive, and F is the share of them up to `so_far`. If many such
    requests start together, F of them have ended, with a mean below the true one, mu. So each running one counts as F
    requests of the length mu + (E[length | > so_far] - mu) / F, which restores the mean mu. Below the usual lengths F
    is close to 0; far above, the request counts as one of a little more than `so_far` tokens. The idea is from Buckley
    and James (1979) for regression on censored values. The share F keeps requests that cannot have ended yet from
    confirming the prior.
    """
    z, zero = (so_far - mean) / spread, -mean / spread
    positive = _tail(zero)
    share = 1 - _tail(z) / positive
    if z > 5 or share <= 0:
        return so_far, max(0.0, share)
    true = mean + spread * _density(zero) / positive
    longer = mean + spread * _density(z) / _tail(z)
    return true + (longer - true) / share, share


def _tail(z: float) -> float:
    return 0.5 * erfc(z / sqrt(2))


def _density(z: float) -> float:
    return exp(-0.5 * z * z) / sqrt(2 * pi)


def middle_of(values: Sequence[float], first: int = 0) -> float:
    """Return Tukey's trimean, a mean robust to outliers, of sorted values from index `first` on."""
    span = len(values) - first - 1
    return (values[first + span // 4] + 2 * values[first + span // 2] + values[first + 3 * span // 4]) / 4
