"""What becomes of requests between several engines, counted by each process that sends them. See `RoutingObserver`."""

from collections.abc import Callable

from roseinfer.server.observe.metrics import LABELS
from roseinfer.server.observe.tallies import Tallies

# Why a request leaves an engine.
CAUSES = ("death", "quiet", "drain")


PLACEMENTS, RETRIES = "roseinfer:router_placements", "roseinfer:router_retries"
PLACED_AGAIN, RESUMES = "roseinfer:router_placed_again", "roseinfer:router_resumes"


class RoutingMetrics:
    """There only with several engines. Of an engine that is there, what is rare is 0 before it has happened, and not
    absent; of one that is gone for good there is nothing: its number never comes again.
    """

    def __init__(self, tallies: Tallies, model_name: str, forget: Callable[[int], None] = lambda engine: None) -> None:
        """`forget` is told of engines that are gone for good."""
        self._forget = forget
        self._model_name = model_name
        counters, caused = tallies.counters, (*LABELS, "cause")
        help = "Requests that the router sent to the engine, by what spoke for it"
        self._placements = counters(PLACEMENTS, help, (*LABELS, "reason"))
        help = "Requests that the engine refused and that went to another, which still could keep their objectives"
        self._retries = counters(RETRIES, help, LABELS)
        help = "Requests without a token so far that left the engine for another, by what had become of it"
        self._again = counters(PLACED_AGAIN, help, caused)
        help = "Requests with tokens that left the engine and went on with another, by what had become of it"
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
        """The engines that this process sends nothing to because they failed."""
        return sorted(self._open)
