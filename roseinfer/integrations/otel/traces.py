"""Traces of inference requests. Needs the extra `otel`, so it is imported only if traces are sent.

All spans of a request are made after its end, from its record, so a token costs nothing. Attribute names follow the
GenAI conventions (open-telemetry/semantic-conventions-genai, "Development"). They are literals because the constants of
language packages are deprecated. Our own attributes begin with `roseinfer.`. Spans contain no prompt, output or key.
"""

import logging
import threading
import time
from contextvars import ContextVar
from itertools import islice

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from roseinfer import __version__
from roseinfer.core.clock import Clock
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import RequestTimes
from roseinfer.integrations.otel.span_attributes import Value, of_choice, of_job, of_result, of_verdict
from roseinfer.server.http.errors import ApiError, as_api_error
from roseinfer.server.observe.records import RequestEntry, RequestRecords
from roseinfer.server.observe.verdict import verdict
from roseinfer.server.request.generation import Observer
from roseinfer.server.request.inference import AnswerFormat, Inference
from roseinfer.server.request.job import Job, JobProgress, PromptRun, SampleRecord, request_end
from roseinfer.server.request.models import ServedModels

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 3.0  # at the end of the process
MAX_CHOICES = 16  # of a request that get spans
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
    **dict.fromkeys(("/score", "/v1/score"), "score"),
}
_PARENT_HEADERS = (b"traceparent", b"tracestate")


class CallNote:
    """Outcome of a call for its trace. `job`: None if the request was rejected before it became a job.

    `now_s`: when the engine finished. `cause`: type of the error that ended the call early. The exception itself would
    refer to this object by its traceback.
    """

    __slots__ = ("cause", "job", "now_s", "progress", "record")

    def __init__(self) -> None:
        self.job: Job | None = None
        self.progress: JobProgress
        self.record: RequestEntry
        self.now_s = 0.0
        self.cause: str | None = None


# The call that the current task answers.
_note: ContextVar[CallNote | None] = ContextVar("roseinfer_trace", default=None)


class TracedObserver:
    """Observer that notes how a request ended for the trace of its call, and passes all events to `inner`."""

    def __init__(self, inner: Observer, records: RequestRecords) -> None:
        self._inner = inner
        self._records = records
        self.started = inner.started
        self.why = inner.why
        self.rejected_unread = inner.rejected_unread
        self.ended_early = inner.ended_early
        self.prompt_done = inner.prompt_done
        self.first_token = inner.first_token
        self.inter_token = inner.inter_token
        self.refused = inner.refused

    def ended(self, job: Job, progress: JobProgress, now_s: float, cause: BaseException | None) -> None:
        self._inner.ended(job, progress, now_s, cause)
        note = _note.get()
        if note is not None:
            note.job, note.progress, note.now_s = job, progress, now_s
            note.cause = None if cause is None else error_type(cause)
            (note.record,) = self._records.newest(1, now_s, live=False)  # `inner` has just added it


class TracedInference(Inference):
    """Inference route with a trace for each call."""

    def __init__(self, models: ServedModels, answer_format: AnswerFormat, traces: "Traces") -> None:
        super().__init__(models, answer_format)
        self._traces = traces
        self._clock = models.first.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note = CallNote()
        token = _note.set(note)
        arrival_s = self._clock.now()
        status: int | None = None
        try:
            await super().__call__(scope, receive, send)
        except BaseException as error:
            status = request_end(error).status
            note.cause = note.cause or error_type(error)
            raise
        finally:
            _note.reset(token)
            self._traces.ended(self._clock, scope, note, arrival_s, status)


class Traces:
    """Traces of one API process. A thread sends spans in batches, and drops spans if the queue is full."""

    def __init__(self, exporter: SpanExporter) -> None:
        """Configure sampling, limits and the resource by the variables OTEL_*, as every SDK does."""
        self._exporter = exporter
        self.provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("roseinfer", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> "Traces":
        """Send to a collector by OTLP over HTTP. The variables OTEL_EXPORTER_* set headers, certificates and more."""
        return cls(OTLPSpanExporter(endpoint=endpoint))

    def inference(self, models: ServedModels, answer_format: AnswerFormat) -> Inference:
        return TracedInference(models, answer_format, self)

    def observer(self, inner: Observer, records: RequestRecords) -> Observer:
        return TracedObserver(inner, records)

    def ended(self, clock: Clock, scope: Scope, note: CallNote, arrival_s: float, status: int | None) -> None:
        """Record the trace of a call. `status`: of an error response that is still to be sent, else None.

        Errors are logged and lose only the trace.
        """
        try:
            now_s = clock.now()
            self._spans(scope, note, arrival_s, now_s, status or scope["state"]["status"], _Wall(now_s))
        except Exception:
            log.exception("cannot record the trace of request=%s", scope["state"]["request_id"])

    def close(self) -> None:
        """Send the remaining spans, for at most `FLUSH_TIMEOUT_S`. Call it in a thread, because it blocks."""
        sending = threading.Thread(target=self.provider.shutdown, name="roseinfer-traces", daemon=True)
        sending.start()
        sending.join(FLUSH_TIMEOUT_S)
        if sending.is_alive():
            log.warning("traces are lost: the collector did not accept them within %g s", FLUSH_TIMEOUT_S)
            self._exporter.shutdown()

    def _spans(self, scope: Scope, note: CallNote, arrival_s: float, now_s: float, status: int, wall: "_Wall") -> None:
        operation = _OPERATIONS.get(scope["path"], "chat")
        job = note.job
        root = self._tracer.start_span(
            operation if job is None else f"{operation} {job.model}",
            self._propagator.extract(_carrier(scope)),
            SpanKind.SERVER,
            start_time=wall.ns(arrival_s),
        )
        if root.is_recording():
            shown: dict[str, Value] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "roseinfer"}
            shown |= {"gen_ai.request.id": scope["state"]["request_id"], "http.response.status_code": status}
            if note.cause is not None:
                shown["error.type"] = note.cause
            if job is not None:
                record = note.record
                shown |= of_job(job) | of_result(job, note.progress, record.outcome, record.rejection)
                shown |= of_verdict(verdict(record))
                self._phases(root, note.progress, note.now_s, wall)
            root.set_attributes(shown)
            # By the HTTP conventions, errors of the client and disconnects are no errors of the server.
            if status >= 500 or (note.cause is not None and status == 200):
                root.set_status(Status(StatusCode.ERROR, note.cause))
        root.end(wall.ns(now_s))

    def _phases(self, root: Span, progress: JobProgress, now_s: float, wall: "_Wall") -> None:
        """Add the spans of the phases of each choice."""
        parent = set_span_in_context(root)
        choices = ((run, sample) for run in progress.runs for sample in run.samples)
        for index, (run, sample) in enumerate(islice(choices, MAX_CHOICES)):
            for name, from_s, to_s in phases(run, sample, now_s):
                span = self._tracer.start_span(name, parent, start_time=wall.ns(from_s))
                span.set_attributes({"roseinfer.choice": index, **of_choice(name, run, sample)})
                span.end(wall.ns(to_s))


class _Wall:
    """Conversion from our clock to nanoseconds since 1970. One per request, because wall clocks may be adjusted."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._now_ns = time.time_ns()

    def ns(self, at_s: float) -> int:
        return self._now_ns - round((self._now_s - at_s) * 1e9)


def phases(run: PromptRun, sample: SampleRecord, now_s: float) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the phases of a choice, on the server's clock.

    If the choice was cut short, its last phase ends at `now_s`.
    """
    times = sample.times or _times(run, sample, now_s)
    ends = (times.scheduled_s, times.first_token_s, times.finished_s)
    found: list[tuple[str, float, float]] = []
    start_s = times.arrival_s
    for name, end_s in zip(("queue", "prefill", "decode"), ends, strict=True):
        if not end_s:  # the choice ended in this phase
            return [*found, (name, start_s, max(start_s, times.finished_s or now_s))]
        found.append((name, start_s, end_s))
        start_s = end_s
    return found


def _times(run: PromptRun, sample: SampleRecord, now_s: float) -> RequestTimes:
    """Return the times of a choice that was cut short, so that its engine reported none."""
    waited_s = sum(seconds for _, seconds in sample.why.waited) if sample.why is not None else 0.0
    scheduled_s = run.arrival_s + waited_s if sample.first_s else 0.0
    return RequestTimes(run.arrival_s, min(scheduled_s, sample.first_s), sample.first_s, now_s)


def error_type(cause: BaseException) -> str:
    """Return the error code of the API if there is one, else the class name. So there are few different values."""
    if isinstance(cause, ClientDisconnect):
        return "client_disconnected"
    if isinstance(cause, RoseinferError):
        error = as_api_error(cause)
        return error.code or (error.type if isinstance(cause, ApiError) else type(cause).__name__)
    return type(cause).__name__


def _carrier(scope: Scope) -> dict[str, str]:
    """Return the headers of the caller's trace. Several `tracestate` form one list (W3C Trace Context, 3.3.1.1)."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name in _PARENT_HEADERS:
            key = name.decode()
            found[key] = f"{found[key]},{value.decode('latin-1')}" if key in found else value.decode("latin-1")
    return found


def _resource() -> Resource:
    """Return the resource. OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES name it, else it is `roseinfer`."""
    made = Resource.create({"service.version": __version__})
    if str(made.attributes.get("service.name", "")).startswith("unknown_service"):
        made = made.merge(Resource({"service.name": "roseinfer"}))
    return made
