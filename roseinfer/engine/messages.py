"""Everything that travels between a client and the engine. Typed msgpack through msgspec, never pickle."""

import msgspec

from roseinfer.core.outputs import RequestOutput, SchedulerStats
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import EngineInfo


class Add(msgspec.Struct, tag="add", array_like=True, gc=False):
    """Start `n` samples of a prompt; sample i is the sequence `sequence_id(request_id, i)`."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    arrival_s: float = 0.0


class Abort(msgspec.Struct, tag="abort", array_like=True, gc=False):
    sequence_ids: list[str]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, gc=False):
    pass


class Ready(msgspec.Struct, tag="ready", array_like=True, gc=False):
    info: EngineInfo


class StartFailed(msgspec.Struct, tag="start_failed", array_like=True, gc=False):
    """`error` is the name of a class in `core.errors`, or empty for an unexpected failure."""

    error: str
    message: str


class Outputs(msgspec.Struct, tag="outputs", array_like=True, gc=False):
    """What one step produced. Doubles as a heartbeat."""

    outputs: list[RequestOutput]
    stats: SchedulerStats
    now_s: float


class Rejected(msgspec.Struct, tag="rejected", array_like=True, gc=False):
    """The engine refused a request; the fields are those of `InvalidRequestError`."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True, gc=False):
    stats: SchedulerStats
    now_s: float


class Failed(msgspec.Struct, tag="failed", array_like=True, gc=False):
    """The engine loop ended with an unexpected error."""

    message: str


ClientMessage = Add | Abort | Shutdown
EngineMessage = Ready | StartFailed | Outputs | Rejected | Heartbeat | Failed


def sequence_id(request_id: str, index: int) -> str:
    return f"{request_id}:{index}"
