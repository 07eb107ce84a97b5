"""The life of one inference request: admitted, read, planned, run, answered, accounted for."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from roseinfer.core.errors import TooManyInflightError
from roseinfer.server.errors import as_api_error, too_many_inflight
from roseinfer.server.events import EventEncoder
from roseinfer.server.generation import Generation
from roseinfer.server.ids import check_request_id
from roseinfer.server.job import Job
from roseinfer.server.limits import Limits, read_json
from roseinfer.server.report import log_start, report
from roseinfer.server.responses import JsonResponse
from roseinfer.server.service import Backend, Service
from roseinfer.server.stream import EventStream
from roseinfer.server.supervisor import Supervisor
from roseinfer.server.whole import WholeAnswer


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an inference route. `request_id` follows X-Request-Id, then the body, else it is random."""

    service: Service
    backend: Backend
    state: dict[str, Any]
    arrival_s: float

    @property
    def limits(self) -> Limits:
        return self.service.limits

    @property
    def request_id(self) -> str:
        return self.state["request_id"]

    def offer_request_id(self, value: str | None) -> None:
        """An id from the body counts if there was none in the header. Raises `ApiError` 400 if it is not valid."""
        if value is not None:
            check_request_id(value, "request_id")
            if not self.state.get("request_id_given"):
                self.state["request_id"] = value


Plan = Callable[[Call, dict[str, Any]], Awaitable[Job]]


class InferenceResponse(Response):
    """Does its work when it is sent, so that the room it takes in the server is given back in one place."""

    def __init__(self, service: Service, plan: Plan) -> None:
        super().__init__()
        self._service = service
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        call = Call(service, service.admit(), scope["state"], service.clock.now())
        with service.lifecycle.ticket() as ticket:
            job = await self._plan(call, await read_json(scope, receive, service.limits))
            service.lifecycle.grow(ticket, len(job.prompts))
            await Run(service, call.backend, job).answer(scope, receive, send)


class Run:
    """One job on the engine."""

    def __init__(self, service: Service, backend: Backend, job: Job) -> None:
        self._service = service
        self._backend = backend
        self._job = job
        self._supervisor = Supervisor()
        self._generation = Generation(job, backend.engine, backend.engine_ids, backend.metrics, service.clock)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the error of a failure before the answer began, and `ClientDisconnect`."""
        if self._service.config.enable_log_requests:
            log_start(self._job)
        if self._job.stream is None:
            await self._answer_whole(scope, receive, send)
        else:
            await self._answer_stream(receive, send)

    def _start(self) -> None:
        try:
            self._generation.start()
        except TooManyInflightError as error:
            self._backend.metrics.refused("max_inflight_requests")
            raise too_many_inflight(str(error), self._service.lifecycle.retry_after_s(1)) from error

    async def _answer_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = WholeAnswer(self._job, self._backend.tokenizer)

        async def collect() -> None:
            async for prompt, chunk in self._generation.chunks():
                answer.feed(prompt, chunk)

        await self._run(collect(), receive)
        await JsonResponse(await self._render(answer))(scope, receive, send)

    async def _render(self, answer: WholeAnswer) -> dict[str, Any]:
        usage = self._generation.account.usage()
        if self._job.logprobs is None and self._job.prompt_logprobs is None:
            return answer.body(usage)
        # The log probabilities of a long text are much to write down.
        return await self._service.offload.run(answer.body, usage)

    async def _answer_stream(self, receive: Receive, send: Send) -> None:
        events = EventStream(send)
        encoder = EventEncoder(self._job, self._backend.tokenizer, self._generation.account.usage)
        # The log probabilities of a long prompt are much to write down, here too.
        heavy = self._job.echo and self._job.logprobs is not None

        async def pass_on() -> None:
            async for prompt, chunk in self._generation.chunks():
                if heavy:
                    data = await self._service.offload.run(encoder.feed, prompt, chunk)
                else:
                    data = encoder.feed(prompt, chunk)
                if data:
                    await events.write(data)

        try:
            await self._run(pass_on(), receive, events)
        except ClientDisconnect:
            return
        except Exception as error:
            if not events.started:
                raise
            await events.fail(as_api_error(error))
            return
        await events.close(encoder.tail())

    async def _run(self, work: Coroutine[Any, Any, None], receive: Receive, events: EventStream | None = None) -> None:
        """Starts the engine's side and awaits `work`. However it ends, nothing of the job stays in the engine."""
        cause: BaseException | None = None
        interval_s = self._service.config.sse_keep_alive_interval
        try:
            with self._service.lifecycle.live(self._supervisor):
                self._start()
                keep_alive = None if events is None else events.keep_alive
                await self._supervisor.run(work, receive, keep_alive, interval_s)
            self._service.lifecycle.finished(len(self._job.prompts))
        except BaseException as error:
            cause = error
            raise
        finally:
            work.close()
            self._generation.cancel()
            report(self._job, self._generation.account, self._backend.metrics, self._service.clock.now(), cause)
