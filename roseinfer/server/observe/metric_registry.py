"""Counters and histograms that cost a fraction of a microsecond per update and can be summed over processes.

prometheus_client's own take locks, search buckets one by one and cannot be sent to another process, so only its text
format is used.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]
# Labels of metrics by engine.
LABELS = ("model_name", "engine")
# Metric -> label values -> numbers: [count] for a counter, [count per bucket ..., sum] for a histogram.
Numbers = dict[str, dict[Labels, list[float]]]


class Counter:
    """One series of a counter."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def inc(self, amount: float = 1.0) -> None:
        self.numbers[0] += amount


class Histogram:
    """One series of a histogram. `numbers`: values per bucket, the last without bound, then their sum."""

    __slots__ = ("_bounds", "numbers")

    def __init__(self, bounds: Sequence[float], numbers: list[float]) -> None:
        self._bounds = bounds
        self.numbers = numbers

    def observe(self, value: float, times: int = 1) -> None:
        self.numbers[bisect_left(self._bounds, value)] += times
        self.numbers[-1] += value * times


class Family(msgspec.Struct, frozen=True):
    """Declaration of a metric. `bounds`: upper bounds of a histogram's buckets, None for a counter."""

    name: str
    help: str
    labels: Labels
    bounds: tuple[float, ...] | None = None

    @property
    def width(self) -> int:
        """Length of one series."""
        return 1 if self.bounds is None else len(self.bounds) + 2

    def metric(self, series: dict[Labels, list[float]]) -> Metric:
        if self.bounds is None:
            counters = CounterMetricFamily(self.name, self.help, labels=self.labels)
            for values, numbers in series.items():
                counters.add_metric(values, numbers[0])
            return counters
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        histograms = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for values, numbers in series.items():
            buckets = list(zip(names, accumulate(numbers[:-1]), strict=True))
            histograms.add_metric(values, buckets, numbers[-1])
        return histograms


Series = TypeVar("Series", Counter, Histogram)


class LabelledSeries(Generic[Series]):
    """Series of one metric by labels. `labels` creates a series with `make`, `drop` removes it."""

    def __init__(self, make: Callable[[list[float]], Series], width: int, numbers: dict[Labels, list[float]]) -> None:
        self._make: Callable[[list[float]], Series] = make
        self._width = width
        self._numbers = numbers
        self._series: dict[Labels, Series] = {}

    def labels(self, *values: str) -> Series:
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = self._make(self._numbers.setdefault(values, [0.0] * self._width))
        return found

    def drop(self, *first: str) -> None:
        """Remove all series whose labels begin with `first`."""
        for values in [values for values in self._numbers if values[: len(first)] == first]:
            del self._numbers[values]
            self._series.pop(values, None)


class MetricRegistry:
    """Counters and histograms of one process. A metric may be declared again, alike, for a further model."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._numbers: Numbers = {}

    def counters(self, name: str, help: str, labels: Labels) -> LabelledSeries[Counter]:
        family = Family(name, help, labels)
        return LabelledSeries(Counter, family.width, self._declare(family))

    def histograms(self, name: str, help: str, bounds: Sequence[float], labels: Labels) -> LabelledSeries[Histogram]:
        family = Family(name, help, labels, tuple(bounds))
        return LabelledSeries(partial(Histogram, bounds), family.width, self._declare(family))

    def _declare(self, family: Family) -> dict[Labels, list[float]]:
        declared = self._families.setdefault(family.name, family)
        assert declared == family, f"{family.name} is declared twice, differently"
        return self._numbers.setdefault(family.name, {})

    def numbers(self) -> Numbers:
        """Return the current numbers. Do not modify them."""
        return self._numbers

    def metrics(self, numbers: Numbers) -> Iterator[Metric]:
        """Yield `numbers`, of this process or summed over several, as Prometheus metrics."""
        for family in self._families.values():
            yield family.metric(numbers.get(family.name, {}))


def total(parts: Iterable[Numbers]) -> Numbers:
    """Return the sum, series by series."""
    summed: Numbers = {}
    for part in parts:
        for name, series in part.items():
            into = summed.setdefault(name, {})
            for values, numbers in series.items():
                known = into.get(values)
                into[values] = numbers if known is None else [a + b for a, b in zip(known, numbers, strict=True)]
    return summed
