"""Metrics of routing between several engines, counted by each API process. See `RoutingObserver`."""

from collections.abc import Callable

from roseinfer.server.observe.metric_registry import LABELS, MetricRegistry

# Why a request leaves an engine.
CAUSES = ("death", "quiet", "drain", "queue")


PLACEMENTS, RETRIES = "roseinfer:router_placements", "roseinfer:router_retries"
PLACED_AGAIN, RESUMES = "roseinfer:router_placed_again", "roseinfer:router_resumes"


class RoutingMetrics:
    """Routing metrics. Series of rare events are 0 from the start; those of removed engines are dropped."""

    def __init__(
        self, registry: MetricRegistry, model_name: str, forget: Callable[[int], None] = lambda engine: None
    ) -> None:
        """`forget`: called with each engine that is removed."""
        self._forget = forget
        self._model_name = model_name
        counters, caused = registry.counters, (*LABELS, "cause")
        help = "Requests that the router sent to the engine, by reason"
        self._placements = counters(PLACEMENTS, help, (*LABELS, "reason"))
        help = "Requests rejected by the engine and sent to another that could still meet their objectives"
        self._retries = counters(RETRIES, help, LABELS)
        help = "Requests without a token that moved from the engine to another, by cause"
        self._again = counters(PLACED_AGAIN, help, caused)
        help = "Requests with tokens that moved from the engine to another and resumed, by cause"
        self._resumes = counters(RESUMES, help, caused)
        self._open: set[int] = set()

    def engine_added(self, engine: int) -> None:
        values = (self._model_name, str(engine))
        self._retries.labels(*values)
        for cause in CAUSES:
            self._again.labels(*values, cause)
            self._resumes.labels(*values, cause)

    def engine_removed(self, engine: int) -> None:
        for family in (self._placements, self._retries, self._again, self._resumes):
            family.drop(self._model_name, str(engine))
        self._open.discard(engine)
        self._forget(engine)

    def placed(self, engine: int, reason: str) -> None:
        self._placements.labels(self._model_name, str(engine), reason).inc()

    def retried(self, engine: int) -> None:
        self._retries.labels(self._model_name, str(engine)).inc()

    def placed_again(self, engine: int, cause: str) -> None:
        self._again.labels(self._model_name, str(engine), cause).inc()

    def resumed(self, engine: int, cause: str) -> None:
        self._resumes.labels(self._model_name, str(engine), cause).inc()

    def breaker(self, engine: int, open: bool) -> None:
        (self._open.add if open else self._open.discard)(engine)

    @property
    def breakers(self) -> list[int]:
        """Engines with an open circuit breaker in this process."""
        return sorted(self._open)
