"""Messages between clients and an engine: typed msgpack through msgspec, never pickle."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from roseinfer.core.adapters import Adapter
from roseinfer.core.outputs import SchedulerStats, SequenceOutput
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt
from roseinfer.engine.adapter_names import AdapterEntry
from roseinfer.engine.api import EngineInfo, StepRecord


class PriorOutput(NamedTuple):
    """Output of a sample on another engine, and seconds from the request's arrival to its first token."""

    token_ids: list[int]
    ttft_s: float


class Add(msgspec.Struct, tag="add", array_like=True, gc=False):
    """Start `n` samples of a prompt; sample i is the sequence `sequence_id(request_id, i)`.

    `seed`: used if the sampling parameters have none.

    Engine and client may have different clocks, so messages hold ages: the request arrived `age_s` seconds before it
    was sent, and `left_s` seconds were left (None = unlimited). `sent_s`: time of sending, if both use the clock of one
    machine. `age_s` is None only if a caller uses the core directly, as `LLM` does. Then the times in the prompt's
    `meta` apply.

    `keys`: keys of the prompt's full blocks, concatenated (`kv.blocks.block_keys`); empty = the engine computes them.
    `outputs`: output of each sample so far, on another engine, after which this one continues; None for a sample that
    has ended; None in place of the list for a new request. `moved`: another engine had the request before.
    """

    request_id: str
    prompt: Prompt
    n: int = 1
    seed: int | None = None
    age_s: float | None = None
    left_s: float | None = None
    sent_s: float | None = None
    keys: bytes = b""
    outputs: list[PriorOutput | None] | None = None
    moved: bool = False


class Abort(msgspec.Struct, tag="abort", array_like=True, gc=False):
    sequence_ids: list[str]


class ReadAdapter(msgspec.Struct, tag="read_adapter", array_like=True, gc=False):
    """Read a LoRA adapter, which is to get a name. `number`: the client's choice, repeated in the `AdapterAnswer`."""

    number: int
    name: str
    path: str


class AdapterUpdate(msgspec.Struct, tag="adapters", array_like=True, gc=False):
    """Names of LoRA adapters that the sender knows. Newer entries replace those of the receiver.

    An engine passes changes on to every client, and sends all names to clients that connect later.
    """

    entries: dict[str, AdapterEntry]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, gc=False):
    """Message of the owner: stop. Other clients may not send it."""


class DrainEngine(msgspec.Struct, tag="drain", array_like=True, gc=False):
    """Message of the owner: report in promises that no more requests are accepted. Late ones are still served."""


class UndrainEngine(msgspec.Struct, tag="undrain", array_like=True, gc=False):
    """Message of the owner: accept requests again."""


class Ready(msgspec.Struct, tag="ready", array_like=True, gc=False):
    info: EngineInfo


class StartFailed(msgspec.Struct, tag="start_failed", array_like=True, gc=False):
    """`error` is the name of a class in `core.errors`, or empty for an unexpected failure."""

    error: str
    message: str


class Outputs(msgspec.Struct, tag="outputs", array_like=True, gc=False):
    """Output of one step for one client; also a heartbeat. `steps`: records since the last message, for the owner."""

    outputs: list[SequenceOutput]
    stats: SchedulerStats
    now_s: float
    steps: list[StepRecord] = []


class Invalid(msgspec.Struct, tag="invalid", array_like=True, gc=False):
    """Answer to an invalid request; the fields are those of `InvalidRequestError`."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class AdapterAnswer(msgspec.Struct, tag="adapter_answer", array_like=True, gc=False):
    """Answer to `ReadAdapter`. `error`: why the adapter cannot be used; None if `adapter` is set. `busy`: the engine
    reads too many at present.
    """

    number: int
    adapter: Adapter | None = None
    error: str | None = None
    busy: bool = False


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True, gc=False):
    """Sign that the loop runs. `steps`: see `Outputs`."""

    stats: SchedulerStats
    now_s: float
    steps: list[StepRecord] = []


class Failed(msgspec.Struct, tag="failed", array_like=True, gc=False):
    """Report that the engine loop ended with an unexpected error. `suspects`: sequences of any client that may have
    caused it.
    """

    message: str
    suspects: list[str] = []


class PromiseUpdate(msgspec.Struct, tag="promised", array_like=True, gc=False):
    """Promise for clients on other hosts, which cannot read the shared memory. It was `age_s` seconds old when sent.
    Its `at_s` is on the engine's clock.
    """

    promise: Promise
    age_s: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Notice that a client closed its connection or ended. Never sent."""


# The client that started the engine and may shut it down; others are numbered from 1 as they connect.
OWNER = 0

ClientMessage = Add | Abort | ReadAdapter | AdapterUpdate | DrainEngine | UndrainEngine | Shutdown
EngineMessage = (
    Ready | StartFailed | Outputs | Invalid | Heartbeat | Failed | PromiseUpdate | AdapterAnswer | AdapterUpdate
)
# (client, message). An unreadable request is received as the answer to it.
Received = tuple[int, ClientMessage | Invalid | Disconnected]
