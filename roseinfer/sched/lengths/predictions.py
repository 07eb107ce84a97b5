"""What predictions of output lengths proved worth, by who made them: the server's predictor, or a tenant's clients."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from math import erfc, exp, log2, pi, sqrt
from typing import NamedTuple

SIZE = 256  # requests that a source is judged by
TENANTS = 32  # of which records are kept
KNOWN = 24  # requests after which a tenant is no newcomer
_NEAREST_SHARE = 1 / 6  # of the record: those whose predictions were closest tell how far one may be off
_BUCKETS = 4  # of predictions, per octave
_STALE = 1 / 16  # of the record, that changed
# What is believed beforehand: relative standard deviations, of lengths around what is expected of them (as of two
# requests), of their mean, and of the slope; and by which shares of what was expected lengths may be longer.
_NOISE, _NOISE_COUNT = 0.5, 2
_MEAN_SPREAD, _SLOPE_SPREAD = 0.25, 0.5
_RESIDUALS = (0.0, 0.0, 0.0, 0.0, 0.25, 1.0)
_CLEARLY = 2.0  # times the variance that chance gives
_LEAST_SHARE = 0.05  # of those alike that have ended, before one that runs says anything


class LengthPair(NamedTuple):
    """Output tokens."""

    predicted: float
    actual: float


class WeightedMoments:
    """Weighted sums of pairs, each with the weight `share` * predicted: what long requests take is what counts, and
    under overload those that end are mostly short.
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
        """Both, `other` scaled down to the weight that this has."""
        share, found = min(1.0, self.w / other.w) if other.w > 0 else 0.0, WeightedMoments()
        for name in self.__slots__:
            setattr(found, name, getattr(self, name) + share * getattr(other, name))
        return found


class SourceRecord:
    """Of one source: the last 256 pairs.

    Expected is mean + slope * (predicted - mean prediction): weighted least squares, with a normal prior (ridge) around
    what `parent` says, or else around predictions being right. This finds what predictions are worth if all are ten
    times too high (slope 0.1), noise (slope 0: the mean), or right but for an error (in between: they shrink towards
    the mean as far as that error asks for). Where those close to a prediction clearly depart from the line, they are
    followed.

    Short outputs end first, so those that have ended are too short. Requests that run make up for it (`see_running`).
    """

    def __init__(self, parent: "SourceRecord | None" = None) -> None:
        self._parent = parent
        self._newest: deque[LengthPair] = deque()
        self._sorted: list[LengthPair] = []
        self._ended = WeightedMoments()
        self._outlived = WeightedMoments()
        self._tables: dict[int, tuple[int, float, list[float]]] = {}  # bucket -> as of, shift, residuals
        self._centre = self._mean = self._spread = 0.0
        self._short = 0.0  # how much shorter than expected those that have ended are
        self._slope = 1.0
        self.seen = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, predicted: float, actual: float) -> None:
        """A request ended by itself."""
        pair = LengthPair(predicted, actual)
        self._newest.append(pair)
        self._ended.add(pair, 1.0)
        insort(self._sorted, pair)
        if len(self._newest) > SIZE:
            oldest = self._newest.popleft()
            self._ended.add(oldest, -1.0)
            del self._sorted[bisect_left(self._sorted, oldest)]
        self.seen += 1
        if self.seen % SIZE == 0:  # so that rounding errors do not add up
            self._ended = WeightedMoments((pair, 1.0) for pair in self._newest)
        self._fit()

    def see_running(self, running: Iterable[LengthPair]) -> None:
        """All requests of this source that run: what was predicted, and how many tokens they have so far. They count
        until they are seen again, ended or not.
        """
        if self._sorted:
            self._outlived = WeightedMoments(self._stand_for(running))
            self._fit()

    def expected(self, predicted: float) -> float:
        """Output tokens."""
        return max(1.0, self._line(predicted) + self._table(predicted)[0])

    def residuals(self, predicted: float) -> tuple[float, list[float]]:
        """A length, and, sorted, by how much those like it were longer (tokens)."""
        return max(1.0, self._line(predicted)), self._table(predicted)[1]

    # --- the line -----------------------------------------------------------------------------------------------
    def _line(self, predicted: float) -> float:
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
        believed, slope = centre, 1.0
        if self._parent is not None:
            believed, slope = self._parent.expected(centre), self._parent._slope
        unexplained = max(0.0, syy - sxy * sxy / sxx) if sxx > 0 else syy
        beforehand = (_NOISE * min(believed, mean)) ** 2
        variance = (unexplained + _NOISE_COUNT * beforehand) / (count + _NOISE_COUNT)
        weight = variance / (_MEAN_SPREAD * believed) ** 2
        self._centre, self._mean = centre, (count * mean + weight * believed) / (count + weight)
        weight = variance / _SLOPE_SPREAD**2
        self._slope = max(0.0, (sxy + weight * slope) / (sxx + weight))
        self._spread = sqrt(variance)
        self._short = sum([self._line(said) - actual for said, actual in self._sorted]) / len(self._sorted)

    def _stand_for(self, running: Iterable[LengthPair]) -> Iterable[tuple[LengthPair, float]]:
        """What requests that run stand for, with shares: in the mean as if they and those like them had all ended."""
        for predicted, so_far in running:
            mean = max(1.0, self._line(predicted))
            spread = max(self._spread * sqrt(mean / max(1.0, self._mean)), 0.01 * mean)
            length, share = censored(so_far, mean, spread)
            if share > _LEAST_SHARE:
                yield LengthPair(predicted, length), share

    # --- around it ----------------------------------------------------------------------------------------------
    def _table(self, predicted: float) -> tuple[float, list[float]]:
        bucket = round(_BUCKETS * log2(max(1.0, predicted)))
        made, shift, residuals = self._tables.get(bucket, (-1, 0.0, []))
        if made < 0 or self.seen - made > _STALE * len(self):
            shift, residuals = self._residuals(2.0 ** (bucket / _BUCKETS))
            self._tables[bucket] = self.seen, shift, residuals
        return shift, residuals

    def _residuals(self, predicted: float) -> tuple[float, list[float]]:
        """How far those close to this prediction are off the line: in the mean, as far as that is neither chance nor
        what all that have ended are off, and each of them.
        """
        found = [actual - self._line(said) for said, actual in self._nearest(predicted)]
        count, shift = len(found), 0.0
        if count >= KNOWN:
            mean = sum(found) / count
            chance = sum([(value - mean) ** 2 for value in found]) / count**2
            off = mean + self._short
            if off * off > _CLEARLY * chance:
                shift = off - _CLEARLY * chance / off
        length = max(1.0, self._line(predicted))
        return shift, sorted([*found, *[length * share for share in _RESIDUALS]])

    def _nearest(self, predicted: float) -> Sequence[LengthPair]:
        pairs = self._sorted
        wanted = max(KNOWN, round(_NEAREST_SHARE * len(pairs)))
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
    """One record for the server's predictor and one for each of the last tenants that hinted. What is believed of a
    tenant that is not known yet is what others proved worth when they were new.
    """

    def __init__(self) -> None:
        self._server = SourceRecord()
        self._newcomers = SourceRecord()
        self._tenants: dict[str, SourceRecord] = {}  # the last that ended a request comes last

    def of(self, hinted: bool, tenant: str) -> SourceRecord:
        return self._tenants.get(tenant, self._newcomers) if hinted else self._server

    def known(self, hinted: bool, tenant: str) -> bool:
        """Whether enough has ended to tell."""
        record = self._tenants.get(tenant) if hinted else self._server
        return record is not None and record.seen >= KNOWN

    def add(self, hinted: bool, tenant: str, predicted: float, actual: float) -> None:
        """A request ended by itself."""
        if not hinted:
            self._server.add(predicted, actual)
            return
        record = self._tenants.pop(tenant, None)
        if record is None:
            record = SourceRecord(self._newcomers)
            if len(self._tenants) >= TENANTS:
                del self._tenants[self._least()]
        self._tenants[tenant] = record
        if record.seen < KNOWN:
            self._newcomers.add(predicted, actual)
        record.add(predicted, actual)

    def see_running(self, running: Iterable[tuple[bool, str, LengthPair]]) -> None:
        """All requests that run: hinted, tenant, and what was predicted and is there."""
        by_record: dict[SourceRecord, list[LengthPair]] = {
            record: [] for record in (self._server, *self._tenants.values())
        }
        for hinted, tenant, pair in running:
            by_record.setdefault(self.of(hinted, tenant), []).append(pair)
        for record, pairs in by_record.items():
            record.see_running(pairs)

    def _least(self) -> str:
        """The one longest unseen, of those little is known of if there are any: new names do not push out old ones."""
        little = (name for name, record in self._tenants.items() if record.seen < KNOWN)
        return next(little, next(iter(self._tenants)))


def censored(so_far: float, mean: float, spread: float) -> tuple[float, float]:
    """A length, and the share of an ended request that it counts as, to put in place of one that has `so_far` tokens.

    Of lengths that are normal (`mean`, `spread`) but positive, F is the share up to `so_far`. If many like it started
    at once, F of them have ended, with a mean length below the true one, mu. Each that runs on counts as F requests of
    the length mu + (E[length | > so_far] - mu) / F, which makes the mean mu again. Below the usual lengths that is next
    to nothing; far above, one request of a little more than `so_far`. The idea is Buckley and James's (1979) for
    regression on censored values; the share F keeps those that cannot have ended yet from confirming what is believed.
    """
    z, zero = (so_far - mean) / spread, -mean / spread
    positive = _beyond(zero)
    share = 1 - _beyond(z) / positive
    if z > 5 or share <= 0:
        return so_far, max(0.0, share)
    true = mean + spread * _density(zero) / positive
    longer = mean + spread * _density(z) / _beyond(z)
    return true + (longer - true) / share, share


def _beyond(z: float) -> float:
    return 0.5 * erfc(z / sqrt(2))


def _density(z: float) -> float:
    return exp(-0.5 * z * z) / sqrt(2 * pi)


def middle_of(values: Sequence[float], first: int = 0) -> float:
    """Tukey's trimean, a mean that a few outliers do not move, of sorted values from index `first` on."""
    span = len(values) - first - 1
    return (values[first + span // 4] + 2 * values[first + span // 2] + values[first + 3 * span // 4]) / 4
