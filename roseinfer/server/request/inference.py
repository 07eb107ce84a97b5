"""The life of one inference request: admitted, read, planned, run, answered, accounted for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from roseinfer.core.errors import TooManyInflightError
from roseinfer.server.http.auth import key_digest
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.connection import EXTENSION, ClientConnection
from roseinfer.server.http.errors import ApiError, Dialect, as_api_error, deadline_exceeded, too_many_inflight
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.middleware import check_request_id
from roseinfer.server.request.generation import Generation, Receiver
from roseinfer.server.request.job import Job, Usage, usage_of
from roseinfer.server.request.lifecycle import Guard, Ticket
from roseinfer.server.request.objectives import Headers
from roseinfer.server.request.planning import Planning
from roseinfer.server.request.receivers import AllBegun, Body, Encoder, EventStream, StreamAnswer, WholeAnswer
from roseinfer.server.request.service import Backend, Service
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an inference route. `request_id` follows X-Request-Id, then the body, else it is random."""

    service: Service
    backend: Backend
    state: dict[str, Any]
    arrival_s: float
    headers: Headers = ()
    planning: Planning | None = None

    @property
    def limits(self) -> Limits:
        return self.service.limits

    @property
    def key(self) -> str | None:
        """Digest of the request's API key, if anything depends on it."""
        return key_digest(self.headers) if self.service.slo_classes.keys else None

    @property
    def request_id(self) -> str:
        return self.state["request_id"]

    def end_planning_by(self, by_s: float | None) -> None:
        """Raises `ApiError` 504 if that is over; None = no deadline."""
        if by_s is not None and self.planning is not None:
            self.planning.end_by(by_s)

    def offer_request_id(self, value: str | None) -> None:
        """An id from the body counts if there was none in the header. Raises `ApiError` 400 if it is not valid."""
        if value is not None:
            check_request_id(value, "request_id")
            if not self.state.get("request_id_given"):
                self.state["request_id"] = value


class AnswerFormat(Protocol):
    """One API as a translation: how a body becomes a job, and how what the engine makes of it becomes an answer."""

    path: str
    # Of all answers on the path and below it, errors included.
    dialect: Dialect

    async def plan(self, call: Call, body: dict[str, Any]) -> Job:
        """Raises `ApiError` 4xx or `InvalidRequestError` for a body that asks for what cannot be done."""
        ...

    def events(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> Encoder:
        """For a stream. `usage`: so far."""
        ...

    def whole(self, job: Job, tokenizer: Tokenizer) -> Body:
        """For an answer in one piece."""
        ...


class JobRun(Protocol):
    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a job and answer its request. Raises `RoseinferError` and `ClientDisconnect` if that has not begun."""
        ...


# How the jobs of an API run: the usual way is `Run`.
Runs = Callable[[Call, AnswerFormat, Job, ClientConnection, Ticket], JobRun]


class Inference:
    """An inference route as an ASGI application. A request has a place from when it has been read until the engine is
    done with it.

    Raises `RoseinferError` and `ClientDisconnect` if the answer has not begun.
    """

    def __init__(self, service: Service, answer_format: AnswerFormat, runs: Runs | None = None) -> None:
        self._service = service
        self._runs = runs or Run
        self._format = answer_format
        self.path = answer_format.path
        self.dialect = answer_format.dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        arrival_s = service.clock.now()
        try:
            backend, body = await service.read(scope, receive)
        except ApiError as error:
            service.turned_away(scope["state"]["request_id"], self.path, arrival_s, error)
            raise
        with service.lifecycle.ticket() as ticket:
            try:
                planning = service.planning(scope)
                with planning:
                    call = Call(service, backend, scope["state"], arrival_s, scope["headers"], planning)
                    job = await self._format.plan(call, body)
                    ticket.grow(len(job.prompts))
                    if backend.lengths is not None:
                        job = await backend.lengths.fill(job)
            except (ClientDisconnect, ApiError) as error:
                backend.observer.ended_early(scope["state"]["request_id"], error)
                raise
            # A connection refers to the scope: leaving it there would make a reference cycle.
            connection: ClientConnection = scope["extensions"].pop(EXTENSION)
            await self._runs(call, self._format, job, connection, ticket).answer(scope, receive, send)


class Run:
    """One job on the engine."""

    def __init__(
        self, call: Call, answer_format: AnswerFormat, job: Job, connection: ClientConnection, place: Ticket
    ) -> None:
        self._service = service = call.service
        self._backend = backend = call.backend
        self._state = call.state
        self._format = answer_format
        self._job = job
        self._connection = connection
        self._place = place
        self._guard = Guard()
        self._refusable = job.promised and backend.info.policy.sheds
        self._limited = job.meta.deadline_s is not None or job.first_token_by_s is not None
        self._generation = Generation(job, backend.engine, backend.engine_ids, backend.observer, service.clock)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the error of a failure before the answer began, and `ClientDisconnect`."""
        if self._job.stream is None:
            await self._answer_whole(scope, receive, send)
        else:
            await self._answer_stream(send)

    def interrupt(self, cause: ApiError) -> None:
        """End the job with `cause`, unless the engine is done with it."""
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
        self._place.release()
        await self._deliver(JsonResponse(rendered)(scope, receive, send))

    async def _render(self, answer: Body) -> dict[str, Any]:
        usage = self._usage()
        if self._job.logprobs is None and self._job.prompt_logprobs is None:
            return answer.body(usage)
        # The log probabilities of a long text are much to write down.
        return await self._service.offload.run(answer.body, usage)

    async def _answer_stream(self, send: Send) -> None:
        encoder = self._format.events(self._job, self._backend.tokenizer, self._generation.account.usage)
        events = EventStream(send, self._connection, encoder.filler)
        # The log probabilities of a long prompt are much to write down, here too.
        heavy = self._job.echo and self._job.logprobs is not None
        interval_s = self._service.config.sse_keep_alive_interval
        offload = self._service.offload if heavy else None
        answer = StreamAnswer(encoder, events, interval_s, offload, self._refusable or self._limited)
        together = self._refusable and len(self._job.prompts) > 1
        receiver = AllBegun(answer, len(self._job.prompts)) if together else answer
        try:
            last = await self._run(_Ends(receiver, self._on_engine_done), answer.run)
            await self._deliver(events.close(last + encoder.tail(self._usage())))
        except ClientDisconnect:
            return
        except Exception as error:
            if not events.started:
                raise
            await self._deliver(events.fail(encoder.failure(as_api_error(error))))

    def _on_engine_done(self) -> None:
        self._place.release()
        # A drain goes on when the last place is free: it must not end what has only to be written.
        self._service.lifecycle.done_with(self._guard)

    async def _deliver(self, writing: Coroutine[Any, Any, None]) -> None:
        """Write what the engine has nothing to do with any more. Without an end if the server cannot wait for it."""
        guard, lifecycle = Guard(), self._service.lifecycle
        lifecycle.deliver(guard)
        try:
            with guard:
                await writing
        except ApiError as error:
            log.info("request=%s was not delivered: %s", self._job.request_id, error.message)
        finally:
            lifecycle.end(guard)

    def _usage(self) -> Usage:
        """When all is said."""
        account = self._generation.account
        usage = account.usage()
        if not self._job.report_slo:
            return usage
        slo = usage_of(self._job, account.runs)
        if self._job.report_why:
            slo["why"] = self._backend.observer.why(self._job, account, self._service.clock.now())
        return replace(usage, slo=slo)

    async def _run(self, receiver: Receiver, work: Callable[[], Awaitable[Result]]) -> Result:
        """Starts the engine's side and awaits `work`. However it ends, nothing of the job stays in the engine."""
        cause: BaseException | None = None
        clock, observer = self._service.clock, self._backend.observer
        observer.started(self._job, self._generation.account, self._state, clock.now())
        self._connection.on_disconnect(self._on_gone)
        lifecycle = self._service.lifecycle
        try:
            lifecycle.begin(self._guard)
            with self._guard:
                timer = self._first_token_timer()
                try:
                    self._start(receiver)
                    result = await work()
                finally:
                    if timer is not None:
                        timer.cancel()
            lifecycle.finished(len(self._job.prompts))
            return result
        except BaseException as error:
            cause = error
            raise
        finally:
            lifecycle.end(self._guard)
            self._connection.on_disconnect(None)
            self._generation.cancel()
            observer.ended(self._job, self._generation.account, clock.now(), cause)
            if self._backend.lengths is not None:
                self._backend.lengths.ended(self._job, self._generation.account)

    def _first_token_timer(self) -> asyncio.TimerHandle | None:
        by_s = self._job.first_token_by_s
        if by_s is None:
            return None
        return asyncio.get_running_loop().call_later(max(0.0, by_s - self._service.clock.now()), self._on_late)

    def _on_late(self) -> None:
        if not self._generation.account.begun:
            self._guard.interrupt(deadline_exceeded())

    def _on_gone(self) -> None:
        self._guard.interrupt(ClientDisconnect())


class _Ends:
    """Passes everything on, and says when the engine is done."""

    def __init__(self, receiver: Receiver, on_end: Callable[[], None]) -> None:
        self.put = receiver.put
        self._end = receiver.end
        self._on_end = on_end

    def end(self, error: Exception | None) -> None:
        self._on_end()
        self._end(error)
