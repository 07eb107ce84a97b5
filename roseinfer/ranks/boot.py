"""What a rank's process is told when it starts, and what it says of itself."""

import contextlib

import msgspec

from roseinfer.core import errors
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import EngineDeadError, RoseinferError


class RankBoot(msgspec.Struct):
    """The line that a rank's process reads on its standard input. `folder`: of the model. `group`: the group's name.

    `ring_bytes`, and the descriptors `ring`, `bell` (see `ring.RingReader`), `store` (see `SharedStore`) and `status`,
    where it writes a `RankSays` for each line. `engine`: its number, if there are several.
    `stacks`: the file where it is to write where its threads are, when it gets the signal for it.
    """

    config: EngineConfig
    folder: str
    store: int
    group: str
    rank: int
    size: int
    ring: int
    ring_bytes: int
    bell: int
    status: int
    parent: int
    log_level: int
    log_json: bool
    engine: int | None = None
    stacks: str | None = None


class RankSays(msgspec.Struct):
    """`here`: it is about to join the others. Otherwise its last words: the type of a typed error ("": of no such), and
    what it says.
    """

    here: bool = False
    error: str = ""
    message: str = ""


def last_words(error: BaseException) -> RankSays:
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception:  # it is anybody's
        message = "what it says cannot be had"
    message = message.encode(errors="replace").decode()  # or JSON cannot carry it
    if isinstance(error, RoseinferError):
        return RankSays(error=kind, message=message)
    return RankSays(message=f"{kind}: {message}"[:500])


def as_error(rank: int, says: RankSays) -> RoseinferError:
    """The error that a rank has ended with, as rank 0 raises it."""
    kind = getattr(errors, says.error, None) if says.error else None
    if isinstance(kind, type) and issubclass(kind, RoseinferError) and kind is not EngineDeadError:
        with contextlib.suppress(TypeError):  # one that is made of more than a message
            return kind(says.message)
    return EngineDeadError(f"rank {rank} failed: {says.message}")
