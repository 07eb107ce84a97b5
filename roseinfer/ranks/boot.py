"""Messages between rank 0 and the process of another rank: how it starts, and its status."""

from typing import Self

import msgspec

from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import EngineDeadError, RoseinferError
from roseinfer.processes.child import ErrorReport, LogSettings


class RankBoot(msgspec.Struct):
    """Boot struct of a rank's process.

    `folder`: of the model. `group`: name of the group. `ring` and `wake_pipe`: descriptors for a `RingReader` of
    `ring_bytes`; `store`: descriptor for a `SharedStore`. `engine`: number of the engine, if there are several.
    `stacks`: file for its threads' stacks, written on a signal.
    """

    config: EngineConfig
    folder: str
    store: int
    group: str
    rank: int
    size: int
    ring: int
    ring_bytes: int
    wake_pipe: int
    log: LogSettings
    engine: int | None = None
    stacks: str | None = None


class RankRead(msgspec.Struct):
    """Result of reading an adapter on another rank: its digest, or why it cannot be used."""

    digest: str = ""
    error: str = ""


class RankStatus(msgspec.Struct):
    """Frame from a rank's process to rank 0. `error`: why it ends. `read`: result of a call `READ`. Without both, it is
    about to join the group.
    """

    error: ErrorReport | None = None
    read: RankRead | None = None

    @classmethod
    def of(cls, error: BaseException) -> Self:
        return cls(ErrorReport.of(error))


def rank_error(rank: int, report: ErrorReport) -> RoseinferError:
    """Return the error of another rank as rank 0 raises it."""
    error = report.as_error()
    if error is None or isinstance(error, EngineDeadError):
        return EngineDeadError(f"rank {rank} failed: {report.message}")
    return error
