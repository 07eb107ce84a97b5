"""A server's side of text workers: the host process, workers forked from it, and jobs sent to them."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections import deque
from dataclasses import dataclass
from typing import cast

import msgspec

from roseinfer.core.errors import (
    ConfigError,
    InvalidRequestError,
    RequestTooLongError,
    RoseinferError,
    TokenizerFailedError,
)
from roseinfer.processes.frames import FrameReader, frame
from roseinfer.processes.launch import ChildProcess, launch
from roseinfer.text.template_check import MAX_WALL_S, TOO_SLOW, ended_by
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.worker.host import ALIASES, ANSWER, COMMAND, END, FORK
from roseinfer.text.worker.messages import (
    AliasesNeeded,
    Answer,
    Boot,
    Job,
    Loaded,
    Result,
    Start,
    TextFacts,
    TextJobFailed,
    TextJobRefused,
    TextOrder,
    TooMuch,
    Unusable,
)

log = logging.getLogger(__name__)

HOST_MODULE = "roseinfer.text.worker.host"
REAP_TIMEOUT_S = 1.0  # from the end of a process's sockets until its exit code is known
MAX_START_S = 120.0
MAX_FORK_TRIES = 2
# Signals that end a worker whose job exceeds its processor time, memory or stack.
_COSTS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
_START = msgspec.msgpack.Decoder(Start)


class WorkerLostError(RoseinferError):
    """A worker, or the host of all, has ended for a reason unrelated to the job, which may succeed later."""


def boot_of(tokenizer: Tokenizer) -> bytes:
    """Encode the first message to a host. Slow for a large vocabulary."""
    boot = Boot(tokenizer.backend.to_str(), tokenizer.config, tokenizer.chat_template)
    return msgspec.msgpack.encode(boot)


class ReplyChannel(asyncio.Protocol):
    """Frames from a process, one for each waiting caller in turn."""

    def __init__(self) -> None:
        self._frames = FrameReader()
        self._received: deque[bytes] = deque()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._transport: asyncio.Transport | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has classes of its own

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(WorkerLostError("a text worker has ended"))

    def data_received(self, data: bytes) -> None:
        self._received += self._frames.feed(data)
        while self._received and self._waiting:
            future = self._waiting.popleft()
            body = self._received.popleft()
            if not future.done():
                future.set_result(body)

    def expect(self) -> "asyncio.Future[bytes]":
        """Return the future of the next frame. It fails with `WorkerLostError`."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self.lost:
            future.set_exception(WorkerLostError("a text worker has ended"))
        elif self._received:
            future.set_result(self._received.popleft())
        else:
            self._waiting.append(future)
        return future

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(slots=True)
class TextWorker:
    """One forked process. `aliases`: whether it was forked after the tokenizer's aliases were built."""

    channel: ReplyChannel
    pid: int
    aliases: bool


class TextHost:
    """Client of the host process, which starts with `start` or the first worker, and again if it has ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._started: asyncio.Task[TextFacts] | None = None
        self._child: ChildProcess | None = None
        self._owner: socket.socket | None = None  # for descriptors, which the channel does not send
        self._channel = ReplyChannel()
        self._closed = False
        self._obeys = False  # until the template check is over, which may hang
        self._aliases = False

    async def start(self) -> TextFacts:
        """Start the host and return facts about tokenizer and template.

        Raises `ConfigError` for a template that cannot be used.
        """
        if self._started is None or (self._channel.lost and self._started.done()):
            self._started = asyncio.create_task(self._start())
            self._started.add_done_callback(_retrieve)
        return await asyncio.shield(self._started)

    async def _start(self) -> TextFacts:
        self._release()
        self._aliases = self._obeys = False
        boot = await asyncio.to_thread(boot_of, self._tokenizer)
        if self._closed:
            raise WorkerLostError("the server is shutting down")
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            # In a session of its own, as Ctrl-C is for the server.
            self._child = launch(HOST_MODULE, arguments=[str(descriptor)], pass_fds=[descriptor], new_session=True)
        self._owner = ours.dup()
        self._channel = ReplyChannel()
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=ours)
        try:
            self._channel.write(frame(boot))
            ready = await self._until_ready()
        except BaseException:
            self._release()
            raise
        self._obeys = True
        return ready

    async def _until_ready(self) -> TextFacts:
        try:
            message = await self._receive(MAX_START_S)
        except TimeoutError:
            raise WorkerLostError(f"the text worker did not load its tokenizer within {MAX_START_S:g} s") from None
        if isinstance(message, Loaded):
            try:
                message = await self._receive(MAX_WALL_S)
            except WorkerLostError:
                raise ConfigError(ended_by(await self._end_signal())) from None
            except TimeoutError:
                raise ConfigError(TOO_SLOW) from None
        if isinstance(message, Unusable):
            raise ConfigError(message.reason)
        assert isinstance(message, TextFacts), "the last message of a start"
        return message

    async def _receive(self, timeout_s: float) -> Start:
        async with asyncio.timeout(timeout_s):
            return _START.decode(await self._channel.expect())

    async def _end_signal(self) -> int:
        """Return the number of the signal that has ended the host, 0 if none is known."""
        assert self._child is not None
        try:
            async with asyncio.timeout(REAP_TIMEOUT_S):
                return max(0, -await self._child.wait())
        except TimeoutError:
            return 0

    async def fork(self, memory_bytes: int, niceness: int) -> TextWorker:
        """Fork a worker that may take `memory_bytes` of its own. Raises `WorkerLostError` and what `start` raises."""
        for _ in range(MAX_FORK_TRIES):
            await self.start()
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise WorkerLostError(f"no text worker can be started: {error}") from error
            with theirs:
                answer = self._command(FORK, memory_bytes, niceness, theirs)
                aliases = self._aliases
            try:
                pid = await asyncio.shield(answer)
            except BaseException:
                ours.close()
                answer.add_done_callback(self._end_unused)
                raise
            if pid:
                return await self._connected(ours, pid, aliases)
            ours.close()  # the host has just ended, or the system has no process left
        raise WorkerLostError("no text worker can be started")

    async def _connected(self, ours: socket.socket, pid: int, aliases: bool) -> TextWorker:
        channel = ReplyChannel()
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        except BaseException:
            self._command(END, pid, lost=signal.SIGKILL)
            raise
        return TextWorker(channel, pid, aliases)

    def _end_unused(self, forked: "asyncio.Future[int]") -> None:
        """End a worker whose job was cancelled before it was forked: only the host can reap it."""
        if not forked.cancelled() and forked.exception() is None and forked.result():
            self._command(END, forked.result(), lost=signal.SIGKILL)

    async def build_aliases(self) -> None:
        """Build the aliases for workers that are forked later. Raises `WorkerLostError`."""
        if not self._aliases:
            if await self._command(ALIASES, lost=-1):
                raise WorkerLostError("the text workers' host has ended")
            self._aliases = True

    def end(self, worker: TextWorker) -> "asyncio.Future[int]":
        """End a worker. The result, which need not be awaited, is the number of the signal that ended it."""
        worker.channel.close()
        return self._command(END, worker.pid, lost=signal.SIGKILL)

    def _command(
        self, letter: bytes, first: int = 0, second: int = 0, end: socket.socket | None = None, lost: int = 0
    ) -> "asyncio.Future[int]":
        """Send a command and return the future of its answer. `lost`: the answer if the host has ended."""
        loop = asyncio.get_running_loop()
        answer = self._channel.expect()
        number: asyncio.Future[int] = loop.create_future()
        answer.add_done_callback(lambda done: _pass_on(done, number, lost))
        if self._owner is not None:
            # Commands are small and answered soon, so the socket never fills.
            with contextlib.suppress(OSError):
                socket.send_fds(
                    self._owner, [COMMAND.pack(letter, first, second)], [] if end is None else [end.fileno()]
                )
        return number

    def close(self) -> None:
        """End the host and all workers. Waiting callers get `WorkerLostError`."""
        self._closed = True
        if self._started is not None:
            self._started.cancel()
        self._release()

    def _release(self) -> None:
        self._channel.close()
        self._channel.lost = True
        if self._owner is not None:
            with contextlib.suppress(OSError):
                self._owner.shutdown(socket.SHUT_RDWR)  # which makes the host end, and its workers
            self._owner.close()
            self._owner = None
        if self._child is not None:
            self._child.stop_in_thread(REAP_TIMEOUT_S if self._obeys else 0.0)
            self._child.close()
            self._child = None


def _retrieve(started: "asyncio.Task[TextFacts]") -> None:
    """Retrieve the exception: the caller may have been cancelled."""
    if not started.cancelled():
        started.exception()


def _pass_on(done: "asyncio.Future[bytes]", number: "asyncio.Future[int]", lost: int) -> None:
    if number.done():
        return
    if done.cancelled():
        number.cancel()
    elif done.exception() is not None:
        number.set_result(lost)
    else:
        number.set_result(ANSWER.unpack(done.result())[1])


class TextWorkerPool:
    """Workers of one kind. `reuse`: a worker does one job after another, else each job gets a fresh one.

    The pool does not limit how many jobs run: as many workers are started.
    """

    def __init__(self, host: TextHost, *, memory_bytes: int, niceness: int = 0, reuse: bool) -> None:
        self._host = host
        self._memory_bytes = memory_bytes
        self._niceness = niceness
        self._reuse = reuse
        self._idle: list[TextWorker] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode

    async def perform(self, job: Job, cpu_s: float) -> Result:
        """Perform the job and return its result. Cancelling kills its worker.

        Raises `InvalidRequestError` if the job is invalid or too costly, `TokenizerFailedError`,
        and `WorkerLostError`.
        """
        try:
            order = self._encode(TextOrder(job, cpu_s))
        except (UnicodeEncodeError, RecursionError, OverflowError) as error:
            raise InvalidRequestError(f"the messages cannot be encoded: {error}"[:300], "messages") from error
        answer = await self._ask(order, cpu_s)
        if isinstance(answer, AliasesNeeded):
            await self._host.build_aliases()
            answer = await self._ask(order, cpu_s, aliases=True)
        return result_of(answer, cpu_s, self._memory_bytes)

    async def _ask(self, order: bytes, cpu_s: float, aliases: bool = False) -> Answer:
        worker = await self._worker(aliases)
        try:
            worker.channel.write(frame(order))
            answer = self._decode(await worker.channel.expect())
        except WorkerLostError:
            number = await self._host.end(worker)
            if number in _COSTS:
                raise too_costly(cpu_s if number == signal.SIGPROF else None, self._memory_bytes) from None
            raise
        except BaseException:
            self._host.end(worker)
            raise
        if self._reuse and not isinstance(answer, AliasesNeeded | TooMuch):
            self._idle.append(worker)
        else:
            self._host.end(worker)
        return answer

    async def _worker(self, aliases: bool) -> TextWorker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.channel.lost and (worker.aliases or not aliases):
                return worker
            self._host.end(worker)
        return await self._host.fork(self._memory_bytes, self._niceness)


def result_of(answer: Answer, cpu_s: float, memory_bytes: int) -> Result:
    """Return the result in an answer. Raises what `TextWorkerPool.perform` raises."""
    if isinstance(answer, TextJobRefused):
        if answer.too_long is not None:
            raise RequestTooLongError(answer.message, answer.param, *answer.too_long)
        raise InvalidRequestError(answer.message, answer.param, answer.code)
    if isinstance(answer, TooMuch):
        raise too_costly(None, memory_bytes)
    if isinstance(answer, TextJobFailed):
        raise TokenizerFailedError(answer.reason)
    if isinstance(answer, AliasesNeeded):  # the host that has built them has ended
        raise WorkerLostError("the text workers' host has ended")
    return answer


def too_costly(cpu_s: float | None, memory_bytes: int) -> InvalidRequestError:
    """Return the error of a job that has used too much processor time (`cpu_s`), or too much memory (None)."""
    what = f"{memory_bytes >> 20} MiB of memory" if cpu_s is None else f"{cpu_s:.3g} s of processor time"
    message = f"the prompt takes more than {what} to render and tokenise; send a shorter one"
    return InvalidRequestError(message, None, "text_too_costly")
