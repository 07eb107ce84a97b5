"""The processes of the ranks other than 0, as rank 0 sees them: started, watched, told what to do, ended."""

import contextlib
import itertools
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from roseinfer.core import logs
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import EngineDeadError, ResourceError, RoseinferError
from roseinfer.core.stacks import forget_ranks, rank_stacks_path
from roseinfer.ranks.boot import RankBoot, RankSays, as_error
from roseinfer.ranks.calls import CLOSE
from roseinfer.ranks.ring import RingWriter, shared_descriptor

log = logging.getLogger("roseinfer.ranks")

MODULE = "roseinfer.ranks.process"
# Terminals and service managers send these to the whole group; the engine's owner decides what they mean.
OWNERS_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
LOOK_S = 0.25
# For a rank to end by itself once it is told to, which may be in the middle of a step.
CLOSE_PATIENCE_S = 3.0
# For the word of a rank that has just ended to be read.
WORD_S = 1.0
Made = TypeVar("Made")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Home:
    """Of an engine that has a process to itself: the folder that it shares with its owner, its number, and whether
    there are several. `tell`: has the owner hear why the engine does not start; from any thread.
    """

    private: Path
    index: int = 0
    several: bool = False
    tell: Callable[[RoseinferError], None] = lambda error: None


@dataclass
class _Rank:
    """One of them. `status`: where it says something, by its descriptor `voice`; `heard`: what is no whole line yet."""

    number: int
    process: "subprocess.Popen[bytes]"
    status: int
    voice: int
    heard: bytes = b""
    here: bool = False
    words: RankSays | None = None
    silent: bool = False

    def listen(self) -> bool:
        """Take what it has said. False if it will say nothing more: it ends."""
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self.status, 4096):
                *lines, self.heard = (self.heard + said).split(b"\n")
                for line in lines:
                    says = _said(line)
                    if says.here:
                        self.here = True
                    else:
                        self.words = says
            return False
        return True

    @property
    def why(self) -> RoseinferError:
        """Why it has ended."""
        if self.words is not None:
            return as_error(self.number, self.words)
        code = self.process.returncode
        reason = f"the process of rank {self.number} ended with code {code}"
        if code == -signal.SIGKILL:
            reason += " (killed, as the system does when memory runs out)"
        return EngineDeadError(reason)


class OtherRanks:
    """`start` them, `boot` them, `await_here`; when all have `started`, `tell` them things, and `close`.

    `store`: the descriptor of what they share before they are connected. If one of them ends before it was told to, all
    are ended, `failure` says why, and `on_loss` is called in the thread that watches them; so it is if they do not end
    when they are told to. That thread has also made them: the system ends them when it ends.
    """

    def __init__(self, size: int, home: Home | None = None, module: str = MODULE) -> None:
        """size: of the group, rank 0 included. home: None if the engine is a guest in another's process. Raises
        `ResourceError`.
        """
        self.size = size
        self.home = home
        self.failure: RoseinferError | None = None
        self.on_loss: Callable[[], None] = lambda: None
        self._module = module
        self._ranks: list[_Rank] = []
        self._up = self._closing = False
        self._changed = threading.Condition()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, name="roseinfer-ranks", daemon=True)
        self.name = f"roseinfer-{os.getpid()}-{next(_numbers)}"  # of the group
        with contextlib.ExitStack() as undo:
            try:
                self.store = shared_descriptor(0)
                undo.callback(os.close, self.store)
                self._ring = RingWriter(size - 1, self.go_on)
            except OSError as error:
                raise _no_process(error) from error
            undo.callback(self._ring.close)
            self._undo = undo.pop_all()

    def start(self) -> None:
        """Start the processes, which import what they need. Raises `ResourceError`."""
        self._thread.start()
        try:
            self._started.result()
        except OSError as error:
            self.close()
            raise _no_process(error) from error

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def boot(self, config: EngineConfig, model: Path) -> None:
        """Have each load its part of the model in the folder `model`."""
        home = self.home
        if home is not None:
            forget_ranks(home.private, home.index)
        for rank in self._ranks:
            pid, stacks = rank.process.pid, None
            if home is not None:
                stacks = str(rank_stacks_path(home.private, home.index, rank.number, pid))
            boot = RankBoot(
                config=config,
                folder=str(model),
                store=self.store,
                group=self.name,
                rank=rank.number,
                size=self.size,
                ring=self._ring.memory,
                ring_bytes=self._ring.size,
                bell=self._ring.bells[rank.number - 1],
                status=rank.voice,
                parent=os.getpid(),
                log_level=logging.getLogger("roseinfer").getEffectiveLevel(),
                log_json=logs.logs_json(),
                engine=home.index if home is not None and home.several else None,
                stacks=stacks,
            )
            assert rank.process.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has ended, as who watches it says
                # The pipe stays open: its end tells the process that we are gone.
                rank.process.stdin.write(msgspec.json.encode(boot) + b"\n")
                rank.process.stdin.flush()

    def await_here(self) -> None:
        """Return once all are about to join the group. Raises what has kept one from it."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or all(rank.here for rank in self._ranks))
        self.check()

    def join(self, make: Callable[[], Made]) -> Made:
        """What `make` returns, which may wait for a rank that has ended. Then it is left to itself, in a thread of its
        own, and the failure is raised.
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

    def started(self) -> None:
        """All have built their part, and listen."""
        self._up = True

    def tell(self, message: bytes | memoryview) -> None:
        """Raises the failure if there is one."""
        self.check()
        self._ring.write(message)

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def go_on(self) -> None:
        """For whoever waits for another rank: raises if that has become vain."""
        self.check()
        if self._closing:
            raise EngineDeadError("the engine is closed, and a rank does not listen any more")

    def failure_behind(self, error: Exception) -> Exception:
        """Why a call of rank 0 has failed that waits for other ranks: because one of them has, if there is such a one;
        else `error` itself.
        """
        if isinstance(error, RoseinferError) and not isinstance(error, EngineDeadError):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._closing, WORD_S)
        return self.failure or error

    def end(self) -> None:
        """Have the processes end, soon, also those that do not listen. May be called again."""
        if self._closing:
            return
        self._closing = True
        if self.failure is None and self._up and not self._ring.torn:
            with contextlib.suppress(EngineDeadError):  # then they are killed in a moment
                self._ring.write(CLOSE)
        else:
            self._kill()

    def close(self) -> None:
        """End the processes and wait until nothing of them is left. May be called again."""
        self.end()
        # That thread itself closes what it finds when it collects garbage.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._undo.close()

    # --- the thread that watches them ---------------------------------------------------------------------------
    def _live(self) -> None:
        # What starts inherits the mask: a Ctrl+C before it can ignore that would end it, with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, OWNERS_SIGNALS)
        try:
            for number in range(1, self.size):
                self._ranks.append(self._spawn(number))
        except OSError as error:
            self._kill()
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
            self._watch()
        for rank in self._ranks:
            rank.process.wait()
            assert rank.process.stdin is not None
            with contextlib.suppress(OSError):
                rank.process.stdin.close()
            os.close(rank.status)

    def _spawn(self, number: int) -> _Rank:
        status, voice = os.pipe()
        try:
            os.set_blocking(status, False)
            process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                pass_fds=[voice, self.store, self._ring.memory, self._ring.bells[number - 1]],
            )
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(voice)
        return _Rank(number, process, status, voice)

    def _watch(self) -> None:
        """Until all have ended, and that has been seen."""
        voices = select.poll()
        for rank in self._ranks:
            voices.register(rank.status, select.POLLIN)
        until_s, left = math.inf, True
        while left:
            left = any(rank.process.poll() is None for rank in self._ranks)
            voices.poll(LOOK_S * 1000 if left else 0)
            self._look(voices)
            if self._closing and math.isinf(until_s):
                until_s = time.monotonic() + CLOSE_PATIENCE_S
            if left and time.monotonic() > until_s:
                until_s = math.nan  # once
                self._kill()
                self.on_loss()

    def _look(self, voices: "select.poll") -> None:
        """Hear what they say, and see whether one has ended."""
        with self._changed:
            for rank in self._ranks:
                if rank.listen() or rank.silent:
                    continue
                rank.silent = True
                voices.unregister(rank.status)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(LOOK_S)
            # Who has said its last words may be kept for long by what a process does when it ends.
            ended = [rank for rank in self._ranks if rank.words or rank.process.poll() is not None]
            if ended and not self._closing and self.failure is None:
                self._lose(next((rank for rank in ended if rank.words), ended[0]))
            self._changed.notify_all()

    def _lose(self, lost: _Rank) -> None:
        self.failure = lost.why
        if self._up:  # else whoever starts them says so
            log.error("%s", self.failure)
        self._kill()
        self.on_loss()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()


def _said(line: bytes) -> RankSays:
    try:
        return msgspec.json.decode(line, type=RankSays)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return RankSays(message=f"it says what nobody understands: {line[:100]!r}")


def _no_process(error: OSError) -> ResourceError:
    return ResourceError(f"no process can be had for another rank: {error.strerror or error}")
