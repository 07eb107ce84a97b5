"""One inference request from its body to its answer."""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from roseinfer.core.errors import TooManyInflightError
from roseinfer.core.pooling import PoolingTask
from roseinfer.server.http.api_keys import Headers, key_digest
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.connection import EXTENSION, ClientConnection
from roseinfer.server.http.errors import ApiError, Dialect, as_api_error, too_many_inflight, unsupported_task
from roseinfer.server.http.middleware import check_request_id
from roseinfer.server.http.request_models import RequestModel
from roseinfer.server.request.generation import Generation, Receiver
from roseinfer.server.request.job import Job, Usage, slo_usage
from roseinfer.server.request.lifecycle import Guard, RequestGuard, Ticket
from roseinfer.server.request.models import ChosenModel, ServedModels
from roseinfer.server.request.receivers import AllBegun, Body, Encoder, EventStream, StreamAnswer, WholeAnswer
from roseinfer.server.request.service import Backend, Service
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# `AnswerFormat.tasks` of an API that returns text.
GENERATES: frozenset[PoolingTask] = frozenset()

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Context of one request. `request_id`: from X-Request-Id, else from the body, else random.

    `preparation`: guard of everything before the run on the engine.
    """

    model: ChosenModel
    backend: Backend
    state: dict[str, Any]
    arrival_s: float
    headers: Headers
    preparation: RequestGuard

    @property
    def service(self) -> Service:
        return self.model.service

    @property
    def key(self) -> str | None:
        """Digest of the request's API key; None if no SLO class depends on keys."""
        return key_digest(self.headers) if self.service.slo_classes.keys else None

    @property
    def request_id(self) -> str:
        return self.state["request_id"]

    def offer_request_id(self, value: str | None) -> None:
        """Use the id from the body unless a header gave one. Raises `ApiError` 400 if it is invalid."""
        if value is not None:
            check_request_id(value, "request_id")
            if not self.state.get("request_id_given"):
                self.state["request_id"] = value


class AnswerFormat(Protocol):
    """Translation of one API: from a request body to a job, and from its chunks to an answer."""

    path: str
    # Error format of all answers at or below `path`.
    dialect: Dialect
    # What a model must do; empty: generate text.
    tasks: frozenset[PoolingTask]

    @property
    def request_model(self) -> type[RequestModel]: ...

    @property
    def make_run(self) -> "MakeRun":
        """Factory of the runs of its jobs: `StandardRun`, unless a job may run on without its client."""
        ...

    async def make_job(self, call: RequestContext, request: Any) -> Job:
        """Return the job of a request, a `request_model`. Raises `ApiError` 4xx or `InvalidRequestError`."""
        ...

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> Encoder:
        """Return the encoder of a stream. `usage`: returns the usage so far."""
        ...

    def whole(self, job: Job, tokenizer: Tokenizer) -> Body:
        """Return the builder of a non-streamed answer."""
        ...


class JobRun(Protocol):
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a job and answer its request. Raises `RoseinferError` or `ClientDisconnect` before the answer begins."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Request whose job is ready to run. `ticket`: held until the engine has finished."""

    call: RequestContext
    answer_format: AnswerFormat
    job: Job
    connection: ClientConnection
    ticket: Ticket


MakeRun = Callable[[PreparedRequest], JobRun]


class Inference:
    """ASGI application of an inference route. A request holds a ticket from its body's end until the engine's.

    Raises `RoseinferError` or `ClientDisconnect` before the answer begins.
    """

    def __init__(self, models: ServedModels, answer_format: AnswerFormat) -> None:
        self._models = models
        self._parser = models.parser
        self._format = answer_format
        self.request_model = answer_format.request_model
        self._parser.expect(self.request_model)
        self.path = answer_format.path
        self.dialect = answer_format.dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = self._models.first.clock.now()
        try:
            model, backend, body = await self._models.read(scope, receive)
        except ApiError as error:
            self._models.rejected_unread(scope["state"], self.path, arrival_s, error)
            raise
        with Ticket(model.service.lifecycle) as ticket:
            try:
                preparation = model.service.prepare(scope)
                with preparation:
                    self._check_task(model.service, backend)
                    call = RequestContext(model, backend, scope["state"], arrival_s, scope["headers"], preparation)
                    job = await self._format.make_job(call, self._parser.parse(self.request_model, body))
                    ticket.grow(job.places)
                    if backend.lengths is not None:
                        job = await backend.lengths.fill(job)
            except (ClientDisconnect, ApiError) as error:
                backend.observer.ended_early(scope["state"]["request_id"], error)
                raise
            # The connection refers to the scope: keeping it there would be a reference cycle.
            connection: ClientConnection = scope["extensions"].pop(EXTENSION)
            prepared = PreparedRequest(call, self._format, job, connection, ticket)
            await self._format.make_run(prepared).answer(scope, receive, send)

    def _check_task(self, service: Service, backend: Backend) -> None:
        """Raise `ApiError` 400 if the model does something else."""
        pooling, tasks = backend.info.facts.pooling, self._format.tasks
        if bool(tasks) if pooling is None else pooling.task not in tasks:
            name = service.served_names[0]
            raise unsupported_task(name, self.path, None if pooling is None else pooling.task)


class StandardRun:
    """Run of one job on the engine, and its answer."""

    def __init__(self, prepared: PreparedRequest) -> None:
        call = prepared.call
        self._service = service = call.service
        self._backend = backend = call.backend
        self._state = call.state
        self._format = prepared.answer_format
        self._job = job = prepared.job
        self._connection = prepared.connection
        self._ticket = prepared.ticket
        self._guard = RequestGuard(service.lifecycle, prepared.connection, service.clock)
        self._generation = Generation(job, backend.engine, backend.engine_ids, backend.observer, service.clock)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and answer. Raises the error of a failure before the answer begins, or `ClientDisconnect`."""
        if self._job.stream is None:
            await self._answer_whole(scope, receive, send)
        else:
            await self._answer_stream(send)

    def interrupt(self, cause: ApiError) -> None:
        """End the job with `cause`, unless the engine has finished it."""
        self._guard.interrupt(cause)

    def _start(self, receiver: Receiver) -> None:
        try:
            self._generation.start(receiver)
        except TooManyInflightError as error:
            self._backend.observer.refused("max_inflight_requests")
            raise too_many_inflight(str(error), self._service.lifecycle.retry_after_s(1)) from error

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = self._format.whole(self._job, self._backend.tokenizer)
        answer = WholeAnswer(body)
        await self._run(answer, answer.complete)
        rendered = await self._render(body)
        self._ticket.release()
        await self._deliver(JsonResponse(rendered)(scope, receive, send))

    async def _render(self, answer: Body) -> dict[str, Any] | bytes:
        usage = self._usage()
        if not answer.takes_long:
            return answer.body(usage)
        return await self._service.offload.run(answer.body, usage)

    async def _answer_stream(self, send: Send) -> None:
        job, service = self._job, self._service
        encoder = self._format.events(job, self._backend.tokenizer, self._generation.progress.usage)
        events = EventStream(send, self._connection, encoder.filler)
        interval_s = service.config.sse_keep_alive_interval
        offload = service.offload if job.echo and job.logprobs is not None else None
        sheds = job.has_objectives and self._backend.info.policy.sheds
        refusable = sheds or job.meta.deadline_s is not None or job.first_token_by_s is not None
        answer = StreamAnswer(encoder, events, interval_s, offload, refusable, self._on_engine_done)
        receiver = AllBegun(answer, len(job.prompts)) if sheds and len(job.prompts) > 1 else answer
        try:
            last = await self._run(receiver, answer.run)
            await self._deliver(events.write(last + encoder.tail(self._usage()), last=True))
        except ClientDisconnect:
            return
        except Exception as error:
            if not events.started:
                raise
            await self._deliver(events.fail(encoder.failure(as_api_error(error))))

    def _on_engine_done(self) -> None:
        self._ticket.release()
        # A drain proceeds when the last ticket is free: it must not end an answer that only remains to be sent.
        self._service.lifecycle.done_with(self._guard)

    async def _deliver(self, writing: Coroutine[Any, Any, None]) -> None:
        """Send the rest of an answer after the engine has finished. A shutdown may cut it."""
        guard, lifecycle = Guard(), self._service.lifecycle
        lifecycle.deliver(guard)
        try:
            with guard:
                await writing
        except ApiError as error:
            log.info("request=%s: answer cut: %s", self._job.request_id, error.message)
        finally:
            lifecycle.end(guard)

    def _usage(self) -> Usage:
        """Return the final usage."""
        progress = self._generation.progress
        usage = progress.usage()
        if not self._job.report_slo:
            return usage
        slo = slo_usage(self._job, progress.runs)
        if self._job.report_why:
            slo["why"] = self._backend.observer.why(self._job, progress, self._service.clock.now())
        return replace(usage, slo=slo)

    async def _run(self, receiver: Receiver, work: Callable[[], Awaitable[Result]]) -> Result:
        """Start the generation and await `work`. On any end, nothing of the job stays in the engine."""
        cause: BaseException | None = None
        clock, observer = self._service.clock, self._backend.observer
        observer.started(self._job, self._generation.progress, self._state, clock.now())
        try:
            with self._guard:
                if self._job.first_token_by_s is not None:
                    self._guard.end_by(self._job.first_token_by_s, lambda: self._generation.progress.begun)
                self._start(receiver)
                result = await work()
            self._service.lifecycle.finished(self._job.places)
            return result
        except BaseException as error:
            cause = error
            raise
        finally:
            self._generation.cancel()
            observer.ended(self._job, self._generation.progress, clock.now(), cause)
            if self._backend.lengths is not None:
                self._backend.lengths.ended(self._job, self._generation.progress)
