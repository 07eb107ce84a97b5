"""Background responses: they run on when their client has its first answer or has left its stream."""

import asyncio
import logging
from dataclasses import replace

from starlette.types import Message, Receive, Scope, Send

from roseinfer.server.formats.responses.answer import CANCELLED, ResponseWriter
from roseinfer.server.formats.responses.history import Keeper
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.connection import ClientConnection
from roseinfer.server.http.errors import CLIENT_CLOSED_REQUEST, ApiError, as_api_error
from roseinfer.server.request.inference import JobRun, PreparedRequest, StandardRun
from roseinfer.server.request.job import StreamChoices
from roseinfer.server.request.lifecycle import Ticket
from roseinfer.server.response_store.shared import RunningResponse

log = logging.getLogger(__name__)

# Events of a response without `stream` are not read: there is one at the start and the rest at the end.
_UNREAD = StreamChoices(interval=2**31)


class BackgroundRuns:
    """Factory of runs, see `request.inference.MakeRun`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, prepared: PreparedRequest) -> JobRun:
        if not prepared.job.about.get("background"):
            return StandardRun(prepared)
        return _BackgroundAnswer(prepared, self._tasks)


class _BackgroundAnswer:
    def __init__(self, prepared: PreparedRequest, tasks: "set[asyncio.Task[None]]") -> None:
        self._prepared = prepared
        self._job = prepared.job
        self._tasks = tasks

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start the run and answer the request. Raises the error of a stream that failed before it began."""
        keeper = self._job.store_answer
        assert isinstance(keeper, Keeper), "what runs in the background is stored"
        queued = ResponseWriter(self._job).queued()
        running = await keeper.begin(queued)
        if self._job.stream is None:
            self._start(running, scope, receive, _discard)
            await JsonResponse(queued)(scope, receive, send)
            return
        task = self._start(running, scope, receive, send)
        await asyncio.shield(task)

    def _start(self, running: RunningResponse, scope: Scope, receive: Receive, send: Send) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._work(running, scope, receive, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self, running: RunningResponse, scope: Scope, receive: Receive, send: Send) -> None:
        streamed = self._job.stream is not None
        job = replace(self._job, store_answer=running.keep, stream=self._job.stream or _UNREAD)
        connection = _Unwatched(self._prepared.connection if streamed else None)
        with Ticket(self._prepared.call.service.lifecycle) as ticket:
            self._prepared.ticket.release()  # the connection would hold it for as long as its client reads
            ticket.grow(len(job.prompts))
            run = StandardRun(replace(self._prepared, job=job, connection=connection, ticket=ticket))
            running.on_cancel(lambda: run.interrupt(_cancelled()))
            try:
                await run.answer(scope, receive, send)
            except Exception as error:
                known = as_api_error(error)
                running.fail({"code": known.code or known.type, "message": known.message, **known.advice()})
                if streamed:
                    raise
                if not isinstance(error, ApiError):
                    log.warning("background response %s failed: %r", job.id, error)
            finally:
                # Of a task that is cancelled, as at the end of the event loop; else its end is known by now.
                running.fail_with_server("The server ended while this response ran")


class _Unwatched(ClientConnection):
    """Connection of a client that may leave. `connection` None: the client has its answer already."""

    __slots__ = ("_connection",)

    def __init__(self, connection: ClientConnection | None) -> None:
        self._connection = connection
        self.filler = b""

    @property
    def write_paused(self) -> bool:
        return self._connection is not None and self._connection.write_paused

    def write(self, data: bytes) -> None:
        if self._connection is not None:
            self._connection.write(data)

    def on_disconnect(self, callback: object) -> None:
        """Ignore the end of the connection."""


async def _discard(message: Message) -> None:
    """Drop a message: the client has its answer already."""


def _cancelled() -> ApiError:
    return ApiError(CLIENT_CLOSED_REQUEST, "The response was cancelled", code=CANCELLED)
