"""The process of a rank other than 0: a runner that does what rank 0 says, and ends with it."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from roseinfer.core import logs
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.cpu_settings import prepare_cpu_libraries
from roseinfer.core.errors import EngineDeadError, RoseinferError
from roseinfer.core.garbage import IdleGarbageCollector
from roseinfer.core.plan import TokenMasks
from roseinfer.core.runner import Runner
from roseinfer.core.stacks import enable_stack_dumps
from roseinfer.ranks.boot import RankBoot, RankSays, last_words
from roseinfer.ranks.calls import Call, CallReader, Sampled
from roseinfer.ranks.others import OWNERS_SIGNALS
from roseinfer.ranks.ring import RingClosedError, RingReader

log = logging.getLogger("roseinfer.ranks")

# Of Linux's prctl: the signal that a process gets when the thread that has made it ends.
_PR_SET_PDEATHSIG = 1
# For a GPU, whose steps are short; a CPU's are longer than it takes to wake up, and its cores have work to do.
GPU_SPIN_S = 2e-4


def main() -> int:
    """Read a `RankBoot` line from standard input, then do what rank 0 says until it says that it is over."""
    for number in OWNERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OWNERS_SIGNALS)  # as who starts us has blocked them
    _end_with_parent()
    prepare_cpu_libraries()
    _import_slowly()
    line = sys.stdin.buffer.readline()
    if not line:  # rank 0 has ended before it had anything to say
        return 1
    boot = msgspec.json.decode(line, type=RankBoot)
    if os.getppid() != boot.parent:  # it has ended before the system could know whom to end with it
        return 1
    logs.configure(as_json=boot.log_json, engine=boot.engine, rank=boot.rank)
    logging.getLogger("roseinfer").setLevel(boot.log_level)
    if boot.stacks is not None:
        enable_stack_dumps(Path(boot.stacks))
    threading.Thread(target=_exit_with_parent, args=(sys.stdin.fileno(),), name="parent-watch", daemon=True).start()
    try:
        _serve(boot)
    except RingClosedError:
        return 1
    except Exception as error:
        if not isinstance(error, RoseinferError):  # rank 0 says what those are
            log.exception("rank %d failed", boot.rank)
        _say(boot, last_words(error))
        return 1
    return 0


def _import_slowly() -> None:
    """What takes seconds to import, while rank 0 does the same."""
    import roseinfer.ranks.build  # noqa: F401


def _serve(boot: RankBoot) -> None:
    from roseinfer.ranks.build import build_rank

    built, group = build_rank(boot, lambda: _say(boot, RankSays(here=True)))
    spin_s = 0.0 if built.facts.device == "cpu" else GPU_SPIN_S
    garbage = IdleGarbageCollector(MonotonicClock())

    def step_done() -> None:
        group.check()
        garbage.busy()

    place = boot.rank - 1, boot.size - 1
    with RingReader(boot.ring, boot.bell, *place, boot.ring_bytes, spin_s, garbage.idle) as ring:
        follow(ring, built.runner, step_done)


def follow(ring: RingReader, runner: Runner, step_done: Callable[[], None]) -> None:
    """Make the calls that come by the ring, up to `CLOSE`. `step_done` is called behind each step, and may raise.

    Raises `EngineDeadError` if rank 0 samples other tokens.
    """
    calls, sampled = CallReader(), Sampled()
    steps: deque[Any] = deque()
    while True:
        message = ring.read()
        match message[0]:
            case Call.SUBMIT:
                digest, plan = calls.submit(message)
                if digest != sampled.digest():
                    raise EngineDeadError("the ranks have sampled different tokens")
                steps.append(runner.submit(plan))
            case Call.SAMPLE:
                runner.sample(steps[-1])
            case Call.MASKED:
                rows, words = calls.masked(message)
                space = runner.mask_space(len(rows))
                space.cast("B")[:] = words
                runner.sample(steps[-1], TokenMasks(rows, space))
            case Call.COLLECT:
                result = runner.collect(steps.popleft())
                step_done()
                sampled.add(result.rows)
            case _:
                runner.close()
                return


def _say(boot: RankBoot, says: RankSays) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(boot.status, msgspec.json.encode(says) + b"\n")


def _end_with_parent() -> None:
    """Have the system kill this process with the thread that made it, also while it is stopped or stuck in a kernel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_with_parent(stdin: int) -> None:
    """Where the system does not: rank 0 holds the other end of our standard input."""
    while os.read(stdin, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
