"""Metrics of stored responses."""

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from roseinfer.server.observe.metric_registry import MetricRegistry

NOT_STORED = ("queue_full", "too_large", "unwritable", "failed")
REMOVED = ("deleted", "expired", "evicted")


class StoreMetrics:
    """Implementation of `response_store.records.StoreObserver`.

    Each series exists from the start, because other threads count in them.
    """

    def __init__(self, registry: MetricRegistry, model_name: str) -> None:
        self._model_name = model_name
        stored = registry.counters("roseinfer:responses_stored", "States of responses written to the store", _LABELS)
        self._stored = stored.labels(model_name)
        help = "Responses that should have been stored and were not"
        not_stored = registry.counters("roseinfer:responses_not_stored", help, (*_LABELS, "reason"))
        self._not_stored = {reason: not_stored.labels(model_name, reason) for reason in NOT_STORED}
        removed = registry.counters(
            "roseinfer:responses_removed", "Responses removed from the store", (*_LABELS, "reason")
        )
        self._removed = {reason: removed.labels(model_name, reason) for reason in REMOVED}

    def stored(self, count: int) -> None:
        self._stored.inc(count)

    def not_stored(self, reason: str) -> None:
        self._not_stored[reason].inc()

    def removed(self, reason: str, count: int) -> None:
        self._removed[reason].inc(count)

    def gauges(self, responses: int, size: int) -> Iterable[Metric]:
        """Return the contents of the store, of all processes."""
        for name, help, value in (
            ("roseinfer:stored_responses", "Responses in the store", responses),
            ("roseinfer:stored_response_bytes", "Bytes of the responses in the store, input included", size),
        ):
            family = GaugeMetricFamily(name, help, labels=_LABELS)
            family.add_metric((self._model_name,), value)
            yield family


_LABELS = ("model_name",)
