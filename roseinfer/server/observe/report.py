"""Observation of requests and engines: metrics, records, log lines, and the text of `/metrics`."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from prometheus_client.core import Metric

from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import Engine, EngineReport, StepRecord
from roseinfer.server.http.errors import SloUnattainable
from roseinfer.server.observe.exposition import Exposition, Snapshot
from roseinfer.server.observe.metric_registry import LABELS, Labels, MetricRegistry
from roseinfer.server.observe.metrics import (
    ALL_ENGINES,
    MAX_LENGTH_TOKENS,
    EngineMetrics,
    GrammarMetrics,
    LengthMetrics,
    PoolingMetrics,
    TextMetrics,
)
from roseinfer.server.observe.model_names import ModelNames
from roseinfer.server.observe.record_json import why_json
from roseinfer.server.observe.records import RequestRecords
from roseinfer.server.observe.request_log import log_early_abort, log_end, log_start
from roseinfer.server.observe.routing import RoutingMetrics
from roseinfer.server.observe.step_metrics import StepMetrics
from roseinfer.server.observe.tracing import Tracing
from roseinfer.server.request.generation import Observer
from roseinfer.server.request.job import (
    Job,
    JobProgress,
    Outcome,
    PromptRun,
    RequestEnd,
    outcome,
    request_end,
    slack_s,
    slo_class_name,
    worst_latencies,
)

_LATE_S = (30, 10, 5, 2.5, 1, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001)
# Time to the first token is counted in seconds, time per token in milliseconds: both must find their buckets.
SLACK_S = (*(-bound for bound in _LATE_S), 0, *reversed(_LATE_S))


class SloMetrics:
    """Metrics of objectives. A request with several prompts counts once for each.

    Labels hold names of configured classes only, never text from clients.
    """

    def __init__(self, registry: MetricRegistry, values: Labels) -> None:
        self._values = values
        labels = (*LABELS, "slo_class", "outcome")
        self._requests = registry.counters("roseinfer:slo_requests", "Prompts by outcome of their objectives", labels)
        why = (*LABELS, "reason", "cause", "slo_class")
        help = "Prompts rejected because an objective was out of reach, by objective and cause"
        self._rejections = registry.counters("roseinfer:slo_rejections", help, why)
        labels = (*LABELS, "slo_class", "objective")
        help = "Objective minus measured latency of finished prompts; negative = late"
        self._slack = registry.histograms("roseinfer:slo_slack_seconds", help, SLACK_S, labels)

    def ended(self, job: Job, runs: list[PromptRun], end: RequestEnd) -> Outcome | None:
        """Count the prompts of an ended request and return the worst outcome; None if the request was invalid."""
        name = slo_class_name(job)
        if end.cause is None:
            return _worst([self._finished(job, run, name) for run in runs])
        if end.outcome is not None:
            self._requests.labels(*self._values, name, end.outcome).inc(len(job.prompts))
        if isinstance(end.cause, SloUnattainable):
            rejection = end.cause.rejection
            self._rejections.labels(*self._values, rejection.reason, rejection.cause, name).inc(len(job.prompts))
        return end.outcome

    def _finished(self, job: Job, run: PromptRun, name: str) -> Outcome:
        came = outcome(job.meta.slo, run)
        self._requests.labels(*self._values, name, came).inc()
        if job.meta.slo is None or came is Outcome.TIMEOUT:
            return came
        seen = worst_latencies([run])
        if seen is not None:
            for objective, slack in slack_s(job.meta.slo, seen).items():
                self._slack.labels(*self._values, name, objective).observe(slack)
        return came


def _worst(outcomes: Iterable[Outcome]) -> Outcome:
    return next((each for each in outcomes if each is not Outcome.MET), Outcome.MET)


# Merges this process's numbers with those of the server's other processes.
Gather = Callable[[Snapshot], Awaitable[Snapshot]]
# Metrics read at scrape time that are the same in all processes.
Gauges = Callable[[], Awaitable[Iterable[Metric]]]


class RequestReports:
    """Observer that updates metrics and records and writes the log. See `request.generation.Observer`.

    `first_engine`: number of the model's first engine. `log_starts`: also log the start of each request. `name_models`:
    include the model in log lines. `pooling`: None if the model generates text.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        slo_metrics: SloMetrics,
        records: RequestRecords,
        first_engine: int,
        log_starts: bool,
        name_models: bool,
        pooling: PoolingMetrics | None = None,
    ) -> None:
        self._metrics = metrics
        self._records = records
        self._first_engine = first_engine
        self._log_starts = log_starts
        self._name_models = name_models
        self._slo_metrics = slo_metrics
        self._pooling = pooling
        # Called at least once per token, so no method in between.
        self.prompt_done = metrics.prompt_done
        self.first_token = metrics.first_token
        self.inter_token = metrics.inter_token
        self.refused = metrics.refused
        self.rejected_unread = records.rejected_unread

    def started(self, job: Job, progress: JobProgress, state: Mapping[str, Any], now_s: float) -> None:
        self._records.started(job, progress, state, now_s, self._first_engine)
        if self._log_starts:
            log_start(job, name_model=self._name_models)

    def ended_early(self, request_id: str, cause: BaseException) -> None:
        """Count and log a request that the client or the server aborted. Invalid requests are only answered."""
        end = request_end(cause)
        if end.finish == FinishReason.ABORT:
            self._metrics.aborted(end.reason)
            log_early_abort(request_id, end)

    def ended(self, job: Job, progress: JobProgress, now_s: float, cause: BaseException | None) -> None:
        end = request_end(cause)
        for run in progress.runs:
            self._metrics.prompt_ended(run, end.finish, now_s)
        if progress.parsed:
            self._metrics.parsed(job.tool_parser, progress.runs)
        if end.finish == FinishReason.ABORT:
            self._metrics.aborted(end.reason)
        if isinstance(cause, SloUnattainable):
            self._metrics.refused("slo_unattainable")
        came = self._slo_metrics.ended(job, progress.runs, end)
        record = self._records.ended(progress, now_s, end._replace(outcome=came))
        if self._pooling is not None and cause is None:
            self._pooling.ended(record.api, progress.runs, record.age_s)
        log_end(job, progress, record, end, name_model=self._name_models)

    def why(self, job: Job, progress: JobProgress, now_s: float) -> dict[str, Any]:
        """Return `usage.slo.why` of a request whose samples have ended."""
        worst = _worst(outcome(job.meta.slo, run) for run in progress.runs)
        return why_json(self._records.of(job, progress, now_s, worst))


class EngineOwner(Protocol):
    """Owner of the engines: the only one that receives every step record."""

    def reports(self) -> list[EngineReport]: ...

    def on_step(self, listener: Callable[[int, StepRecord], None]) -> None: ...


class ModelObservation:
    """Metrics of one model. An `ObserverFactory`. `first_engine`: number of its first engine."""

    def __init__(self, shared: "Observation", name: str, first_engine: int) -> None:
        self.name = name
        self.engine: Engine | None = None
        self._first_engine = first_engine
        self._shared = shared
        self._registry = shared.registry
        self._owner: EngineOwner | None = None
        self._routing: RoutingMetrics | None = None
        self._values = (name, str(first_engine))

    def set_owner(self, owner: EngineOwner) -> None:
        """Use the engine owner of this process. Call before `attach`."""
        self._owner = owner
        owner.on_step(self._shared.steps.step)

    def attach(self, engine: Engine) -> Observer:
        """Start the metrics of an engine that is up, and return the observer of requests."""
        shared, steps = self._shared, self._shared.steps
        self.engine = engine
        if engine.several:
            self._values = (self.name, ALL_ENGINES)
        max_length = MAX_LENGTH_TOKENS if len(shared.models) > 1 else engine.info.facts.max_model_len
        metrics = EngineMetrics(self._registry, max_length, self._values)
        steps.expect([report.engine for report in engine.reports()])
        if self._owner is None:
            engine.on_step(partial(steps.step, self._first_engine))
        if engine.several:
            self._routing = RoutingMetrics(self._registry, self.name, steps.forget)
            engine.on_routing(self._routing)
        slo_metrics = SloMetrics(self._registry, self._values)
        pools = engine.info.facts.pooling is not None
        pooling = PoolingMetrics(self._registry, self._values) if pools else None
        reports = RequestReports(
            metrics, slo_metrics, shared.records, self._first_engine, shared.log_starts, shared.names.several, pooling
        )
        return reports if shared.tracing is None else shared.tracing.observer(reports, shared.records)

    def lengths(self) -> LengthMetrics:
        """Declare metrics of length prediction. Call after `attach`, like the next two."""
        return LengthMetrics(self._registry, self._values)

    def texts(self) -> Callable[[str, float], None]:
        """Declare metrics of text work."""
        return TextMetrics(self._registry, self._values).took

    def grammars(self) -> GrammarMetrics:
        """Declare metrics of output constraints."""
        return GrammarMetrics(self._registry, self._values)

    @property
    def breakers(self) -> list[int]:
        """Engines with an open circuit breaker in this process."""
        return [] if self._routing is None else self._routing.breakers

    def reports(self, *, owned: bool) -> list[EngineReport]:
        """Return the reports of the engines; none if another process owns them and `owned`."""
        source = self._owner or (None if owned else self.engine)
        return [] if source is None else source.reports()


class Observation:
    """Metrics and request records of one API process, and the text of its `/metrics`.

    `models`: one per model, in the order of their engines. `gather`: merges the numbers of other processes.
    `keep_steps`: step records that `steps` keeps, if this process receives any.
    """

    def __init__(
        self,
        model_name: str,
        gather: Gather | None = None,
        keep_steps: int = 0,
        tracing: Tracing | None = None,
        log_starts: bool = False,
    ) -> None:
        self.registry = MetricRegistry()
        self.records = RequestRecords()
        self.log_starts = log_starts
        self.tracing = tracing
        self.names = ModelNames(model_name)
        self.exposition = Exposition(self.registry, self.names)
        self.steps = StepMetrics(self.registry, self.names, keep_steps)
        self.models = [ModelObservation(self, model_name, 0)]
        self._gather = gather
        self._gauges: Gauges | None = None

    def add_model(self, name: str, first_engine: int) -> None:
        """Add a further model. Call before the `attach` of any."""
        self.names.add(name, first_engine)
        self.models.append(ModelObservation(self, name, first_engine))

    def add_gauges(self, gauges: Gauges) -> None:
        """Add `gauges` to the text of `/metrics`."""
        self._gauges = gauges

    def snapshot(self) -> Snapshot:
        """Return this process's numbers, with engine reports if no other process reports the engines."""
        owned = self._gather is not None
        reports = [report for model in self.models for report in model.reports(owned=owned)]
        breakers = [engine for model in self.models for engine in model.breakers]
        return Snapshot(self.registry.numbers(), reports, breakers)

    async def text(self) -> bytes:
        """Return the text of `/metrics`. Raises what `gather` raises."""
        shown = self.snapshot()
        if self._gather is not None:
            shown = await self._gather(shown)
        more = () if self._gauges is None else await self._gauges()
        infos = {model.name: model.engine.info for model in self.models if model.engine is not None}
        return self.exposition.text(shown, infos, more)
