"""What is kept of requests when they end: metrics, those of objectives too, and one line of the log."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

from prometheus_client.core import Metric
from starlette.requests import ClientDisconnect

from roseinfer.core.errors import InvalidRequestError, RoseinferError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Rejection
from roseinfer.engine.api import Engine, EngineReport, StepRecord
from roseinfer.server.http.errors import ApiError, SloUnattainable, as_api_error
from roseinfer.server.http.middleware import CLIENT_CLOSED_REQUEST
from roseinfer.server.observe.exposition import Exposition, Snapshot
from roseinfer.server.observe.metrics import (
    ALL_ENGINES,
    LABELS,
    ONE_ENGINE,
    EngineMetrics,
    GrammarMetrics,
    LengthMetrics,
    StepMetrics,
    TextMetrics,
)
from roseinfer.server.observe.records import End, RequestRecord, RequestRecords
from roseinfer.server.observe.routing import RoutingMetrics
from roseinfer.server.observe.tallies import Labels, Tallies
from roseinfer.server.observe.telling import why_json
from roseinfer.server.observe.verdict import verdict
from roseinfer.server.request.generation import Observer
from roseinfer.server.request.job import (
    Account,
    Job,
    Outcome,
    PromptRun,
    class_of,
    cut_short,
    measured,
    outcome,
    slack_s,
)

_LATE_S = (30, 10, 5, 2.5, 1, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025, 0.001)
# Time to the first token is counted in seconds, time per token in milliseconds: both must find their buckets.
SLACK_S = (*(-bound for bound in _LATE_S), 0, *reversed(_LATE_S))


class SloMetrics:
    """Labels hold the names of the server's own classes, never what clients write. A request with several prompts
    counts once for each.
    """

    def __init__(self, tallies: Tallies, values: Labels) -> None:
        self._values = values
        labels = (*LABELS, "slo_class", "outcome")
        self._requests = tallies.counters("roseinfer:slo_requests", "Prompts by how their objectives were kept", labels)
        why = (*LABELS, "reason", "cause", "slo_class")
        help = "Prompts turned away because an objective was out of reach, by objective and what stood against them"
        self._rejections = tallies.counters("roseinfer:slo_rejections", help, why)
        labels = (*LABELS, "slo_class", "objective")
        help = "Objective less what the server saw, of prompts that finished; negative = late"
        self._slack = tallies.histograms("roseinfer:slo_slack_seconds", help, SLACK_S, labels)

    def ended(self, job: Job, runs: list[PromptRun], cause: BaseException | None) -> Outcome | None:
        """`cause`: what ended the request before its time. Returns the worst that became of a prompt, if it counts."""
        name = class_of(job)
        if cause is not None:
            early = cut_short(cause)
            if early is not None:
                self._requests.labels(*self._values, name, early).inc(len(job.prompts))
            if isinstance(cause, SloUnattainable):
                self._rejected(cause.rejection, name, len(job.prompts))
            return early
        return _worst([self._finished(job, run, name) for run in runs])

    def _finished(self, job: Job, run: PromptRun, name: str) -> Outcome:
        came = outcome(job.slo, run)
        self._requests.labels(*self._values, name, came).inc()
        if job.slo is None or came is Outcome.TIMEOUT:
            return came
        seen = measured([run])
        if seen is not None:
            for objective, slack in slack_s(job.slo, seen).items():
                self._slack.labels(*self._values, name, objective).observe(slack)
        return came

    def _rejected(self, rejection: Rejection, name: str, prompts: int) -> None:
        self._rejections.labels(*self._values, rejection.reason, rejection.cause, name).inc(prompts)


def _worst(outcomes: Iterable[Outcome]) -> Outcome:
    return next((each for each in outcomes if each is not Outcome.MET), Outcome.MET)


log = logging.getLogger(__name__)

# From what this process has counted to what all of the server has.
Gather = Callable[[Snapshot], Awaitable[Snapshot]]
# Metrics that are read when they are asked for, and are the same in all processes.
Gauges = Callable[[], Awaitable[Iterable[Metric]]]
# Puts who else is to be told of requests around who tells the metrics, the records and the log.
Watch = Callable[[Observer, RequestRecords], Observer]


class RequestReports:
    """Tells the metrics, the records and the log of requests. See `request.generation.Observer`.

    `log_starts`: whether a request is logged when it begins too.
    """

    def __init__(
        self, metrics: EngineMetrics, slo_metrics: SloMetrics, records: RequestRecords, log_starts: bool
    ) -> None:
        self._metrics = metrics
        self._records = records
        self._log_starts = log_starts
        self._slo_metrics = slo_metrics
        # Once or more per token: without a call in between.
        self.prompt_done = metrics.prompt_done
        self.first_token = metrics.first_token
        self.inter_token = metrics.inter_token
        self.refused = metrics.refused
        self.turned_away = records.turned_away

    def started(self, job: Job, account: Account, state: Mapping[str, Any], now_s: float) -> None:
        self._records.started(job, account, state, now_s)
        if self._log_starts:
            self._log_start(job)

    def _log_start(self, job: Job) -> None:
        tokens = sum(len(prompt.ids) for prompt in job.prompts)
        kind = "stream" if job.stream else "whole"
        fields = {"request": job.request_id, "started": kind, "choices": job.num_choices, "prompt_tokens": tokens}
        log.info(LogLine("request started", fields))

    def ended_early(self, request_id: str, cause: BaseException) -> None:
        """Counts those that a client or the server cut short; the others are mistakes, which are answered."""
        reason, why = _classify(cause)
        if reason == FinishReason.ABORT:
            self._metrics.aborted(why)
            log.info(LogLine("request ended before its run", {"request": request_id, "finish": reason, "why": why}))

    def ended(self, job: Job, account: Account, now_s: float, cause: BaseException | None) -> None:
        """`cause`: what ended the request before its time, None if all of it finished."""
        reason, why = _classify(cause)
        for run in account.runs:
            self._metrics.prompt_ended(run, reason, now_s)
        if account.parsed:
            self._metrics.parsed(job.tool_parser, account.runs)
        if reason == FinishReason.ABORT:
            self._metrics.aborted(why)
        if isinstance(cause, SloUnattainable):
            self._metrics.refused("slo_unattainable")
        came = self._slo_metrics.ended(job, account.runs, cause)
        record = self._records.ended(job, account, now_s, End(came, reason, why, status_of(cause), cause))
        fields = _fields(record, job, account, reason if cause else "")
        fields["slo_class"], fields["slo"] = class_of(job), came or "invalid"
        if why:
            fields["why"] = why
        if came in _EXPLAINED:
            fields["verdict"] = verdict(record).name or "none"
        line = LogLine("request ended", fields)
        if reason == FinishReason.ERROR:
            log.error(line, exc_info=None if isinstance(cause, RoseinferError) else cause)
        else:
            log.info(line)

    def why(self, job: Job, account: Account, now_s: float) -> dict[str, Any]:
        """What `usage.slo.why` says, when all samples have ended."""
        return why_json(self._records.of(job, account, now_s, _worst(outcome(job.slo, run) for run in account.runs)))


class Owner(Protocol):
    """Who owns the engines: it is told of every step, and knows best how each does."""

    def reports(self) -> list[EngineReport]: ...

    def on_step(self, listener: Callable[[int, StepRecord], None]) -> None: ...


class Observation:
    """All that a process which answers requests counts, and the text of its `/metrics`.

    `gather` adds what other processes have counted to what this one has. `keep_steps`: how many of the newest steps
    `steps` keeps; it is told of them if this process is. `watch`: puts who else is to be told of requests around who
    tells the metrics and the log.
    """

    def __init__(
        self,
        model_name: str,
        gather: Gather | None = None,
        keep_steps: int = 0,
        watch: Watch | None = None,
        log_starts: bool = False,
    ) -> None:
        self.tallies = Tallies()
        self.records = RequestRecords()
        self._log_starts = log_starts
        self._model_name = model_name
        self._exposition = Exposition(self.tallies, model_name)
        self._gather = gather
        self._watch = watch
        self._gauges: Gauges | None = None
        self._engine: Engine | None = None
        self._owner: Owner | None = None
        self.steps = StepMetrics(self.tallies, model_name, keep_steps)
        self._routing: RoutingMetrics | None = None
        self._values = (model_name, ONE_ENGINE)

    def owns(self, owner: Owner) -> None:
        """The owner of the engines is in this process too. To be called before `attach`."""
        self._owner = owner
        owner.on_step(self.steps.step)

    def show_too(self, gauges: Gauges) -> None:
        """Add `gauges` to the text."""
        self._gauges = gauges

    def attach(self, engine: Engine) -> Observer:
        """The engine is up: from now on there are its metrics."""
        self._engine = engine
        if engine.several:
            self._values = (self._model_name, ALL_ENGINES)
        metrics = EngineMetrics(self.tallies, engine.info, self._values)
        steps = self.steps
        steps.expect([report.engine for report in engine.reports()])
        if self._owner is None:
            engine.on_step(lambda record: steps.step(0, record))
        if engine.several:
            self._routing = RoutingMetrics(self.tallies, self._model_name, steps.forget)
            engine.on_routing(self._routing)
        slo_metrics = SloMetrics(self.tallies, self._values)
        reports = RequestReports(metrics, slo_metrics, self.records, self._log_starts)
        return reports if self._watch is None else self._watch(reports, self.records)

    def lengths(self) -> LengthMetrics:
        """For a process that predicts lengths. After `attach`, like the next."""
        return LengthMetrics(self.tallies, self._values)

    def texts(self) -> Callable[[str, float], None]:
        """After `attach`."""
        return TextMetrics(self.tallies, self._values).took

    def grammars(self) -> GrammarMetrics:
        """For a process that takes constraints."""
        return GrammarMetrics(self.tallies, self._values)

    def snapshot(self) -> Snapshot:
        """What this process has counted. Of the engines it tells only if nobody else does, who knows better."""
        breakers = [] if self._routing is None else self._routing.breakers
        watch = self._owner or (self._engine if self._gather is None else None)
        return Snapshot(self.tallies.numbers(), [] if watch is None else watch.reports(), breakers)

    async def text(self) -> bytes:
        """What `/metrics` says. Raises what `gather` raises."""
        shown = self.snapshot()
        if self._gather is not None:
            shown = await self._gather(shown)
        more = () if self._gauges is None else await self._gauges()
        return self._exposition.text(shown, None if self._engine is None else self._engine.info, more)


def _classify(cause: BaseException | None) -> tuple[str, str]:
    """(finish reason of what had not finished, a word on why)."""
    if isinstance(cause, ClientDisconnect):
        return FinishReason.ABORT, "disconnect"
    if isinstance(cause, asyncio.CancelledError) or (isinstance(cause, ApiError) and cause.code == "draining"):
        return FinishReason.ABORT, "shutdown"
    if isinstance(cause, ApiError) and cause.status == CLIENT_CLOSED_REQUEST:
        return FinishReason.ABORT, cause.code or "client"
    if isinstance(cause, InvalidRequestError):
        return "rejected", cause.code or "invalid"
    if isinstance(cause, ApiError) and cause.status == 429:
        return "rejected", cause.code or "limit"
    if isinstance(cause, ApiError) and cause.status == 504:
        return FinishReason.TIMEOUT, cause.code or "limit"
    if cause is None:
        return "", ""
    if isinstance(cause, ApiError) and cause.code:
        return FinishReason.ERROR, cause.code
    return FinishReason.ERROR, f"{type(cause).__name__}: {cause}"[:500]


def status_of(cause: BaseException | None) -> int:
    """Of an answer that had not begun."""
    if cause is None:
        return 200
    if isinstance(cause, Exception) and not isinstance(cause, ClientDisconnect):
        return as_api_error(cause).status
    return CLIENT_CLOSED_REQUEST


# What the log names a verdict of: promises that were not kept.
_EXPLAINED = frozenset(
    (Outcome.MISSED_TTFT, Outcome.MISSED_TPOT, Outcome.MISSED_E2E, Outcome.REJECTED, Outcome.TIMEOUT)
)


class LogLine:
    """One line about a request: `name=value` each as text; JSON logs take `event` and `fields` as they are."""

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: dict[str, Any]) -> None:
        self.event = event
        self.fields = fields

    def __str__(self) -> str:
        return " ".join(
            [
                f"{name}={value:.1f}"
                if type(value) is float
                else f"{name}={value!r}"
                if name == "why"
                else f"{name}={value}"
                for name, value in self.fields.items()
            ]
        )


def _fields(record: RequestRecord, job: Job, account: Account, reason: str) -> dict[str, Any]:
    """What the log says of a request that has ended. `reason`: of samples that had not finished."""
    told = record.told
    finish, first_s, seat_s = record.finish, told.first_s, told.scheduled_s
    if record.choices > 1:
        finish, first_s, seat_s = _of_all(job, account, reason)
    fields: dict[str, Any] = {
        "request": record.request_id,
        "api": job.api,
        "choices": record.choices,
        "finish": finish or reason,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "e2e_ms": record.age_s * 1000,
    }
    if first_s is not None:
        fields["ttft_ms"] = first_s * 1000
    if seat_s is not None:
        fields["queue_ms"] = seat_s * 1000
    return fields


def _of_all(job: Job, account: Account, reason: str) -> tuple[str, float | None, float | None]:
    """How choices ended; seconds until the first token of all came and until the last of them got a seat."""
    samples = [sample for run in account.runs for sample in run.samples]
    ends = sorted({str(sample.finish_reason or reason) for sample in samples})
    firsts = [sample.first_s - job.arrival_s for sample in samples if sample.first_s]
    times = [sample.times for sample in samples if sample.times is not None and sample.times.scheduled_s]
    seats = [each.scheduled_s - each.arrival_s for each in times]
    return ",".join(ends), min(firsts, default=None), max(seats, default=None)
