"""An engine behind a transport that a test steps by hand: what it puts out depends on (prompt, seed, index) alone."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from roseinfer.core.clock import Clock, ManualClock
from roseinfer.core.errors import EngineDeadError
from roseinfer.core.outputs import End, FinishReason, FirstToken, RequestTimes, SchedulerStats, SequenceOutput
from roseinfer.core.request import sequence_id
from roseinfer.core.slo import Cause, Rejection
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.messages import Abort, Add, ClientMessage, EngineMessage, Failed, Heartbeat, Outputs
from tests.helpers.engine_info import engine_info

INFO = engine_info()
TIMES = RequestTimes(1.0, 2.0, 3.0, 9.0)


def token(prompt_ids: list[int], seed: int, index: int) -> int:
    """Output `index` of a sample with that seed, whichever engine computes it: a printable ASCII character."""
    return 32 + zlib.crc32(repr((prompt_ids, seed, index)).encode()) % 95


def expected_vector(prompt_ids: list[int]) -> bytes:
    """Return the result of a prompt-only request, whichever engine computes it."""
    return struct.pack("<2f", len(prompt_ids), zlib.crc32(repr(prompt_ids).encode()))


def expected_ids(prompt_ids: list[int], seed: int, max_tokens: int) -> list[int]:
    return [token(prompt_ids, seed, index) for index in range(max_tokens)]


@dataclass
class Sample:
    """`ids`: put out so far, here or elsewhere."""

    add: Add
    index: int
    ids: list[int]
    begun: bool = False  # here

    @property
    def name(self) -> str:
        return sequence_id(self.add.request_id, self.index)


@dataclass
class ModelEngine:
    """A `Transport`. `step` gives each sample a token, or as many as the test says; nothing is said by itself.

    `dies_at_once`: when it has said that it is ready. `frozen`: what it is told waits. `dead`: what it is told is lost.
    """

    info: EngineInfo = INFO
    dies_at_once: bool = False
    frozen: bool = False
    dead: bool = False
    samples: dict[str, Sample] = field(default_factory=dict)
    heard: list[ClientMessage] = field(default_factory=list)
    adds: list[Add] = field(default_factory=list)
    unread: list[ClientMessage] = field(default_factory=list)
    held: list[EngineMessage] = field(default_factory=list)
    clock: Clock = field(default_factory=lambda: ManualClock(10.0))

    def __post_init__(self) -> None:
        self._on_message: Callable[[EngineMessage], None] = lambda message: None  # before anybody has connected
        self._on_death: Callable[[str], None] = lambda reason: None

    async def start(self, on_message: Callable[[EngineMessage], None], on_death: Callable[[str], None]) -> EngineInfo:
        if self.dead:
            raise EngineDeadError("cannot reach the engine")
        self._on_message, self._on_death = on_message, on_death
        if self.dies_at_once:
            self.die()
        return self.info

    def send(self, message: ClientMessage) -> None:
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ClientMessage)
        if not self.dead:
            self.unread.append(read)
            if not self.frozen:
                self.read()

    async def close(self) -> None:
        self.dead = True
        self.samples.clear()

    # --- the test's side ----------------------------------------------------------------------------------------
    def read(self) -> None:
        messages, self.unread = self.unread, []
        self.heard += messages
        for message in messages:
            if isinstance(message, Abort):
                for sequence in message.sequence_ids:
                    self.samples.pop(sequence, None)
            elif isinstance(message, Add):
                self.adds.append(message)
                for index in range(message.n):
                    said = None if message.outputs is None else message.outputs[index]
                    if message.outputs is None or said is not None:
                        sample = Sample(message, index, list(said.token_ids) if said else [])
                        self.samples[sample.name] = sample

    def step(self, tokens: int = 1, only: Callable[[Sample], bool] = lambda sample: True) -> None:
        self.say([self._advance(sample, tokens) for sample in list(self.samples.values()) if only(sample)])

    def _advance(self, sample: Sample, tokens: int) -> SequenceOutput:
        add, ids = sample.add, sample.ids
        if add.prompt.pooling is not None:
            del self.samples[sample.name]
            end = End(FinishReason.STOP, TIMES, vector=expected_vector(add.prompt.ids))
            return SequenceOutput(sample.name, started=FirstToken(0, 1.0, 2.0, 3.0), end=end)
        seed = add.seed if add.prompt.params.seed is None else add.prompt.params.seed
        assert seed is not None and len(ids) < add.prompt.params.max_tokens
        assert ids == expected_ids(add.prompt.ids, seed + sample.index, len(ids)), "it goes on where it was"
        new = expected_ids(add.prompt.ids, seed + sample.index, min(len(ids) + tokens, add.prompt.params.max_tokens))
        new = new[len(ids) :]
        ids += new
        end = None
        if len(ids) == add.prompt.params.max_tokens:
            del self.samples[sample.name]
            end = End(FinishReason.LENGTH, TIMES)
        started = None if sample.begun or len(ids) > len(new) else FirstToken(0, 1.0, 2.0, 3.0)
        sample.begun = True
        return SequenceOutput(sample.name, tuple(new), None, None, started, end)

    def refuse(
        self,
        sample: Sample,
        predicted_ttft_s: float = 2.0,
        cause: Cause = Cause.QUEUE,
        attainable_s: float | None = None,
    ) -> None:
        del self.samples[sample.name]
        rejection = Rejection("ttft", predicted_ttft_s, cause, attainable_s)
        end = End(FinishReason.REJECTED, TIMES, rejection=rejection)
        self.say([SequenceOutput(sample.name, end=end)])

    def say(self, outputs: list[SequenceOutput]) -> None:
        self.tell(Outputs(outputs, SchedulerStats(), self.clock.now()))

    def beat(self, **stats: int) -> None:
        self.tell(Heartbeat(SchedulerStats(**stats), self.clock.now()))  # type: ignore[arg-type]

    def tell(self, message: EngineMessage) -> None:
        if self.frozen:
            self.held.append(message)
        elif not self.dead:
            self._on_message(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=EngineMessage))

    def thaw(self) -> None:
        """Let an engine that froze send what it had written, and read its messages."""
        self.frozen = False
        held, self.held = self.held, []
        for message in held:
            self.tell(message)
        self.read()

    def die(self, reason: str = "planted death") -> None:
        if not self.dead:
            self.dead = True
            self.samples.clear()
            self._on_death(reason)

    def break_off(self, reason: str = "planted loss") -> None:
        """The connection is lost, and with it what its client had asked for."""
        self.die(reason)

    def fail(self, *suspects: Sample) -> None:
        self.tell(Failed("planted failure", [sample.name for sample in suspects]))
        self.die()
