"""Process of a rank other than 0: its runner makes the calls that rank 0 sends, and it ends with rank 0."""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from roseinfer.core.adapters import AdapterFiles, AdapterRead
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.cpu_settings import prepare_cpu_libraries
from roseinfer.core.errors import EngineDeadError, RoseinferError
from roseinfer.core.garbage import IdleGarbageCollector
from roseinfer.core.plan import TokenMasks
from roseinfer.core.runner import Runner
from roseinfer.core.stacks import enable_stack_dumps
from roseinfer.processes.child import (
    die_with_parent_thread,
    exit_with_parent,
    ignore_terminal_signals,
    read_boot,
    take_stdout,
)
from roseinfer.processes.frames import frame
from roseinfer.ranks.boot import RankBoot, RankRead, RankStatus
from roseinfer.ranks.calls import Call, CallReader, SampledDigest
from roseinfer.ranks.ring import RingClosedError, RingReader

log = logging.getLogger("roseinfer.ranks")

# On GPUs steps are short, so a rank polls for the next call before it sleeps. On CPUs it would take a core from work.
GPU_SPIN_S = 2e-4


def main() -> int:
    """Read a `RankBoot`, then make the calls of rank 0 until it closes the ranks."""
    ignore_terminal_signals()
    die_with_parent_thread()
    status = take_stdout()
    prepare_cpu_libraries()
    _import_torch()
    boot = read_boot(RankBoot)
    boot.log.apply(engine=boot.engine, rank=boot.rank)
    if boot.stacks is not None:
        enable_stack_dumps(Path(boot.stacks))
    exit_with_parent(0.0)
    try:
        _serve(boot, status)
    except RingClosedError:
        return 1
    except Exception as error:
        if not isinstance(error, RoseinferError):  # rank 0 logs those
            log.exception("rank %d failed", boot.rank)
        send_status(status, RankStatus.of(error))
        return 1
    return 0


def _import_torch() -> None:
    """Import what takes seconds, while rank 0 does the same."""
    import roseinfer.ranks.build  # noqa: F401


def _serve(boot: RankBoot, status: int) -> None:
    from roseinfer.ranks.build import build_rank

    built, group = build_rank(boot, lambda: send_status(status, RankStatus()), partial(_report_read, status))
    spin_s = 0.0 if built.facts.device == "cpu" else GPU_SPIN_S
    garbage = IdleGarbageCollector(MonotonicClock())

    def on_step() -> None:
        group.check()
        garbage.busy()

    place = boot.rank - 1, boot.size - 1
    with RingReader(boot.ring, boot.wake_pipe, *place, boot.ring_bytes, spin_s, garbage.idle) as ring:
        follow(ring, built.runner, on_step, built.adapters)


def _report_read(status: int, result: AdapterRead) -> None:
    digest = "" if result.adapter is None else result.adapter.digest
    send_status(status, RankStatus(read=RankRead(digest, result.error or "")))


def follow(ring: RingReader, runner: Runner, on_step: Callable[[], None], adapters: AdapterFiles | None = None) -> None:
    """Make the calls that come by the ring, up to `CLOSE`. `on_step` is called after each step, and may raise.
    `adapters`: reader of adapters, if there are slots for them.

    Raises `EngineDeadError` if rank 0 has sampled other tokens.
    """
    calls, sampled = CallReader(), SampledDigest()
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
                rows, drafts_before, words = calls.masked(message)
                space = runner.mask_space(len(rows))
                space.cast("B")[:] = words
                runner.sample(steps[-1], TokenMasks(rows, space, drafts_before))
            case Call.COLLECT:
                result = runner.collect(steps.popleft())
                on_step()
                sampled.add(result.rows)
            case Call.READ:
                assert adapters is not None, "there are no slots for adapters"
                adapters.read(*calls.read(message))
            case Call.FORGET:
                assert adapters is not None, "there are no slots for adapters"
                adapters.forget(calls.forget(message))
            case _:
                runner.close()
                return


def send_status(descriptor: int, status: RankStatus) -> None:
    with contextlib.suppress(OSError):  # rank 0 has ended
        os.write(descriptor, frame(msgspec.msgpack.encode(status)))


if __name__ == "__main__":
    raise SystemExit(main())
