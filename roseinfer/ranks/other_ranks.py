"""Processes of the ranks other than 0, as rank 0 sees them."""

import contextlib
import itertools
import logging
import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import EngineDeadError, ResourceError, RoseinferError
from roseinfer.core.stacks import forget_ranks, rank_stacks_path
from roseinfer.processes.child import TERMINAL_SIGNALS, ErrorReport, LogSettings
from roseinfer.processes.frames import FrameReader
from roseinfer.processes.launch import ChildProcess, describe_exit, launch
from roseinfer.ranks.boot import RankBoot, RankRead, RankStatus, rank_error
from roseinfer.ranks.calls import CLOSE
from roseinfer.ranks.ring import RingWriter, shared_descriptor

log = logging.getLogger("roseinfer.ranks")

MODULE = "roseinfer.ranks.process"
POLL_S = 0.25
# A rank that was told to close has this long, which may be in the middle of a step.
CLOSE_TIMEOUT_S = 3.0
# A failed call waits this long for the report of a rank that has just ended.
REPORT_TIMEOUT_S = 1.0
Made = TypeVar("Made")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class RankHost:
    """Engine process of rank 0, if it is the engine's alone.

    `folder`: shared with its owner. `index`: number of the engine. `several`: there are several engines.
    `report_error`: tells the owner why the engine does not start; called from any thread.
    """

    folder: Path
    index: int = 0
    several: bool = False
    report_error: Callable[[RoseinferError], None] = lambda error: None


@dataclass
class _Rank:
    """Process of one rank. `ready`: about to join the group. `report`: why it ends. `closed`: its pipe has ended.
    `reads`: results of reading adapters, in the order of the calls.
    """

    number: int
    child: ChildProcess
    frames: FrameReader = field(default_factory=FrameReader)
    ready: bool = False
    reads: deque[RankRead] = field(default_factory=deque)
    report: ErrorReport | None = None
    closed: bool = False

    @property
    def status_pipe(self) -> int:
        return self.child.stdout.fileno()

    def read_status(self) -> bool:
        """Read its status frames. Return False at the end of the pipe."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.status_pipe, 4096):
                for body in self.frames.feed(data):
                    status = _decoded(body)
                    if status.error is not None:
                        self.report = status.error
                    elif status.read is not None:
                        self.reads.append(status.read)
                    else:
                        self.ready = True
            return False
        return True

    @property
    def error(self) -> RoseinferError:
        """Return why it has ended."""
        if self.report is not None:
            return rank_error(self.number, self.report)
        code = self.child.exit_code
        assert code is not None
        return EngineDeadError(f"the process of rank {self.number} {describe_exit(code)}")


class OtherRanks:
    """Supervisor of the other ranks: `start`, `boot`, `await_ready_to_join`, `mark_started`, `send` calls, `close`.

    If a rank ends before `end`, all are ended, `failure` says why, and `on_loss` is called in the thread that watches
    them; so it is if they do not end in time after `end`. That thread also launches them: Linux kills them with it.
    `store`: descriptor for the `SharedStore` of the rendezvous. `name`: of the group.
    """

    def __init__(self, size: int, host: RankHost | None = None, module: str = MODULE) -> None:
        """size: of the group, rank 0 included. host: None for an engine in a process of its user's.

        Raises `ResourceError`.
        """
        self.size = size
        self.host = host
        self.failure: RoseinferError | None = None
        self.on_loss: Callable[[], None] = lambda: None
        self._module = module
        self._ranks: list[_Rank] = []
        self._started = self._closing = False
        self._changed = threading.Condition()
        self._launched: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="roseinfer-ranks", daemon=True)
        self.name = f"roseinfer-{os.getpid()}-{next(_numbers)}"
        with contextlib.ExitStack() as undo:
            try:
                self.store = shared_descriptor(0)
                undo.callback(os.close, self.store)
                self._ring = RingWriter(size - 1, self.check_open)
            except OSError as error:
                raise _cannot_start(error) from error
            undo.callback(self._ring.close)
            self._undo = undo.pop_all()

    def start(self) -> None:
        """Launch the processes, which import their libraries. Raises `ResourceError`."""
        self._thread.start()
        try:
            self._launched.result()
        except OSError as error:
            self.close()
            raise _cannot_start(error) from error

    @property
    def pids(self) -> list[int]:
        return [rank.child.pid for rank in self._ranks]

    def boot(self, config: EngineConfig, model: Path) -> None:
        """Have each rank load its part of the model in the folder `model`."""
        host = self.host
        if host is not None:
            forget_ranks(host.folder, host.index)
        for rank in self._ranks:
            stacks = None
            if host is not None:
                stacks = str(rank_stacks_path(host.folder, host.index, rank.number, rank.child.pid))
            boot = RankBoot(
                config=config,
                folder=str(model),
                store=self.store,
                group=self.name,
                rank=rank.number,
                size=self.size,
                ring=self._ring.memory,
                ring_bytes=self._ring.size,
                wake_pipe=self._ring.wake_pipes[rank.number - 1],
                log=LogSettings.current(),
                engine=host.index if host is not None and host.several else None,
                stacks=stacks,
            )
            rank.child.send_boot(boot)

    def await_ready_to_join(self) -> None:
        """Wait until all ranks are about to join the group. Raises the error of one that fails."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or all(rank.ready for rank in self._ranks))
        self.check()

    def join(self, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which may wait for a rank that has ended.

        Then the failure is raised, and `make` goes on in a thread of its own.
        """
        made: Future[Made] = Future()

        def run() -> None:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=run, name="roseinfer-join", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self.failure or made.done())
        if not made.done():
            self.check()
        return made.result()

    def mark_started(self) -> None:
        """Note that all ranks have built their part and read calls."""
        self._started = True

    def send(self, message: bytes | memoryview) -> None:
        """Send a call. Raises the failure if there is one."""
        self.check()
        self._ring.write(message)

    def take_reads(self) -> list[RankRead] | None:
        """Return the answer of each rank to the first call `READ` that is not taken yet; None if one is missing."""
        if not all(rank.reads for rank in self._ranks):
            return None
        return [rank.reads.popleft() for rank in self._ranks]

    def check(self) -> None:
        """Raise the failure if there is one."""
        if self.failure is not None:
            raise self.failure

    def check_open(self) -> None:
        """Raise if a wait for another rank is in vain."""
        self.check()
        if self._closing:
            raise EngineDeadError("the engine is closed, and a rank no longer responds")

    def cause_of(self, error: Exception) -> Exception:
        """Return the failure of another rank if it caused `error` of a call on rank 0, else `error`."""
        if isinstance(error, RoseinferError) and not isinstance(error, EngineDeadError):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._closing, REPORT_TIMEOUT_S)
        return self.failure or error

    def end(self) -> None:
        """Have the processes end soon, also those that do not respond. May be called again."""
        if self._closing:
            return
        self._closing = True
        if self.failure is None and self._started and not self._ring.torn:
            with contextlib.suppress(EngineDeadError):  # a rank that does not respond is killed soon
                self._ring.write(CLOSE)
        else:
            self._kill()

    def close(self) -> None:
        """End the processes and wait until nothing of them is left. May be called again."""
        self.end()
        # A garbage collection in that thread may call this.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._undo.close()

    # --- the thread that launches and watches them --------------------------------------------------------------
    def _run(self) -> None:
        # Children inherit the mask: Ctrl+C must not end one with a traceback before it ignores the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
        try:
            for number in range(1, self.size):
                self._ranks.append(self._launch(number))
        except OSError as error:
            self._kill()
            self._launched.set_exception(error)
        else:
            self._launched.set_result(None)
            self._watch()
        for rank in self._ranks:
            rank.child.wait_in_thread()
            rank.child.close()

    def _launch(self, number: int) -> _Rank:
        descriptors = (self.store, self._ring.memory, self._ring.wake_pipes[number - 1])
        rank = _Rank(number, launch(self._module, pass_fds=descriptors, read_stdout=True))
        os.set_blocking(rank.status_pipe, False)
        return rank

    def _watch(self) -> None:
        """Watch until all have ended and this was noticed."""
        pipes = select.poll()
        for rank in self._ranks:
            pipes.register(rank.status_pipe, select.POLLIN)
        until_s, running = math.inf, True
        while running:
            running = any(rank.child.exit_code is None for rank in self._ranks)
            pipes.poll(POLL_S * 1000 if running else 0)
            self._check_ranks(pipes)
            if self._closing and math.isinf(until_s):
                until_s = time.monotonic() + CLOSE_TIMEOUT_S
            if running and time.monotonic() > until_s:
                until_s = math.nan  # once
                self._kill()
                self.on_loss()

    def _check_ranks(self, pipes: "select.poll") -> None:
        with self._changed:
            for rank in self._ranks:
                if rank.closed or rank.read_status():
                    continue
                rank.closed = True
                pipes.unregister(rank.status_pipe)
                rank.child.wait_in_thread(POLL_S)
            # A rank with a report may take long to end.
            ended = [rank for rank in self._ranks if rank.report or rank.child.exit_code is not None]
            if ended and not self._closing and self.failure is None:
                self._lose(next((rank for rank in ended if rank.report), ended[0]))
            self._changed.notify_all()

    def _lose(self, lost: _Rank) -> None:
        self.failure = lost.error
        if self._started:  # else the caller of `build_leader` logs it
            log.error("%s", self.failure)
        self._kill()
        self.on_loss()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.child.kill()


def _decoded(body: bytes) -> RankStatus:
    try:
        return msgspec.msgpack.decode(body, type=RankStatus)
    except msgspec.MsgspecError:
        return RankStatus(ErrorReport("", f"invalid status message: {body[:100]!r}"))


def _cannot_start(error: OSError) -> ResourceError:
    return ResourceError(f"cannot start a process for another rank: {error.strerror or error}")
