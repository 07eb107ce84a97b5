"""What a server's `/metrics` says, and what became of it between two readings. vLLM's names where we share them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from roseinfer.cli.terminal.remote import RemoteError


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading, made at `at_s` of a monotonic clock: samples by name."""

    at_s: float
    samples: Mapping[str, list[Sample]] = field(default_factory=dict)

    def of(self, name: str, **labels: str) -> Iterator[Sample]:
        """The samples of this name that have these labels."""
        for sample in self.samples.get(name, ()):
            if all(sample.labels.get(key) == value for key, value in labels.items()):
                yield sample

    def total(self, name: str, **labels: str) -> float | None:
        """Their sum; None if there is none."""
        values = [sample.value for sample in self.of(name, **labels)]
        return sum(values) if values else None

    def mean(self, name: str, **labels: str) -> float | None:
        values = [sample.value for sample in self.of(name, **labels)]
        return sum(values) / len(values) if values else None

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Of a histogram: counts by upper bound, together."""
        counts: dict[float, float] = {}
        for sample in self.of(f"{name}_bucket", **labels):
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
        return counts

    def values(self, label: str, name: str, **labels: str) -> list[str]:
        """The values that a label has among them, in order; numbers by size."""
        found = {sample.labels.get(label, "") for sample in self.of(name, **labels)}
        return sorted(found, key=lambda value: (not value.isdecimal(), int(value) if value.isdecimal() else 0, value))


def parse_metrics(text: str, at_s: float) -> Scrape:
    """Raises `RemoteError` for what is no Prometheus text."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise RemoteError(f"/metrics is no Prometheus text: {error}") from error
    return Scrape(at_s, samples)


@dataclass(frozen=True, slots=True)
class Window:
    """From one reading to a later one. A counter that fell began anew, as the server was started again; of one that is
    gone, as engines may be, nobody knows by how much it grew.
    """

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    def gained(self, name: str, **labels: str) -> float | None:
        """By how much counters grew, together; None if there are none."""
        before = {frozenset(sample.labels.items()): sample.value for sample in self.before.of(name, **labels)}
        grown = []
        for series, now in self.after.of(name, **labels):
            then = before.get(frozenset(series.items()), 0.0)
            grown.append(now - then if now >= then else now)
        return sum(grown) if grown else None

    def rate(self, name: str, **labels: str) -> float | None:
        """The same per second."""
        gained = self.gained(name, **labels)
        return None if gained is None or not self.seconds > 0 else gained / self.seconds

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Of what a histogram took in meanwhile, as Prometheus' `histogram_quantile` has it: straight lines between the
        bounds of buckets, and the last finite bound for what lies above it. None if it took in nothing.
        """
        then, now = (scrape.buckets(name, **labels) for scrape in (self.before, self.after))
        gained = {bound: count - then.get(bound, 0.0) for bound, count in now.items()}
        began_anew = any(count < 0 for count in gained.values())
        return _quantile(share, dict(sorted((now if began_anew else gained).items())))


def _quantile(share: float, counts: Mapping[float, float]) -> float | None:
    """`counts`: cumulative, by upper bound, in order."""
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
