"""Metrics of a server, and their changes between two readings. Names are vLLM's where both have them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from roseinfer.cli.terminal.remote import RemoteError


class MetricSample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading at `at_s` (monotonic clock): samples by name."""

    at_s: float
    samples: Mapping[str, list[MetricSample]] = field(default_factory=dict)

    def of(self, name: str, **labels: str) -> Iterator[MetricSample]:
        """Return the samples of this name with these labels."""
        for sample in self.samples.get(name, ()):
            if all(sample.labels.get(key) == value for key, value in labels.items()):
                yield sample

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of these samples; None if there is none."""
        values = [sample.value for sample in self.of(name, **labels)]
        return sum(values) if values else None

    def mean(self, name: str, **labels: str) -> float | None:
        values = [sample.value for sample in self.of(name, **labels)]
        return sum(values) / len(values) if values else None

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's cumulative counts by upper bound."""
        counts: dict[float, float] = {}
        for sample in self.of(f"{name}_bucket", **labels):
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
        return counts

    def values(self, label: str, name: str, **labels: str) -> list[str]:
        """Return the sorted values of a label among these samples; numbers by size."""
        found = {sample.labels.get(label, "") for sample in self.of(name, **labels)}
        return sorted(found, key=lambda value: (not value.isdecimal(), int(value) if value.isdecimal() else 0, value))


def parse_metrics(text: str, at_s: float) -> Scrape:
    """Parse Prometheus text. Raises `RemoteError` for anything else."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[MetricSample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(MetricSample(sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise RemoteError(f"/metrics is not Prometheus text: {error}") from error
    return Scrape(at_s, samples)


@dataclass(frozen=True, slots=True)
class Window:
    """Change between two readings. A counter that fell has restarted from zero; one that disappeared has no known
    change.
    """

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    def increase(self, name: str, **labels: str) -> float | None:
        """Return the total increase of these counters; None if there is none."""
        before = {frozenset(sample.labels.items()): sample.value for sample in self.before.of(name, **labels)}
        grown = []
        for series, now in self.after.of(name, **labels):
            then = before.get(frozenset(series.items()), 0.0)
            grown.append(now - then if now >= then else now)
        return sum(grown) if grown else None

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the increase per second."""
        increase = self.increase(name, **labels)
        return None if increase is None or not self.seconds > 0 else increase / self.seconds

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Return a quantile of what a histogram recorded within the window; None if it recorded nothing.

        As Prometheus' `histogram_quantile`: linear between the bounds of a bucket, and the last finite bound above it.
        """
        then, now = (scrape.buckets(name, **labels) for scrape in (self.before, self.after))
        increase = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
        began_anew = any(count < 0 for count in increase.values())
        return _quantile(share, dict(sorted((now if began_anew else increase).items())))


def _quantile(share: float, counts: Mapping[float, float]) -> float | None:
    """Compute a quantile of cumulative `counts` by upper bound, in order."""
    total = counts.get(math.inf, 0.0)
    if not total > 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in counts.items():
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low
