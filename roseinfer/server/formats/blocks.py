"""Answers as a sequence of blocks (reasoning, text, tool calls), for Responses and Messages.

Parser events become blocks that open, grow and close. A stream writes these changes, a whole answer the final blocks,
so the two cannot differ. A `BlockWriter` has what differs between the two APIs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.formats.answers import ChoiceBuffer, ChoicePart, Choices
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.job import Job, Usage
from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, Reasoning, TextBreak


class Kind(StrEnum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class Block:
    """Block of an answer at `index`. `complete`: it was not cut. `call_id`, `name`: of a call."""

    __slots__ = ("_parts", "call_id", "complete", "index", "kind", "name")

    def __init__(self, kind: Kind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.index = index
        self.call_id = call_id
        self.name = name
        self.complete = False
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Reasoning, text, or arguments of a call, so far."""
        return "".join(self._parts)

    def grow(self, text: str) -> None:
        self._parts.append(text)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change = Opened | Grown | Closed


class Blocks:
    """Blocks of one choice; at most the last is open.

    White space before reasoning or a tool call is dropped: it waits until more text follows.
    """

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._space: list[str] = []

    def add(self, event: Event) -> Iterator[Change]:
        if isinstance(event, CallStart | Reasoning):
            self._space.clear()
        if isinstance(event, CallStart):
            yield from self._begin(Kind.CALL, event.id, event.name)
        elif isinstance(event, CallArguments):
            yield from self._grow(event.text)
        elif isinstance(event, CallEnd):
            yield from self._close(event.complete)
        elif isinstance(event, TextBreak):
            yield from self._close(True)
        elif isinstance(event, Reasoning):
            # Harmony's parser separates reasonings by an empty line, even where they are blocks of their own.
            text = event.text if self._in(Kind.REASONING) else event.text.lstrip("\n")
            yield from self._extend(Kind.REASONING, text)
        else:
            yield from self._add_text(event.text)

    def end(self, complete: bool) -> Iterator[Change]:
        """Close the last block. `complete`: the model ended by itself."""
        if not any(block.kind is Kind.CALL for block in self.all):
            yield from self._extend(Kind.TEXT, "".join(self._space))
        self._space.clear()
        yield from self._close(complete)

    def _add_text(self, text: str) -> Iterator[Change]:
        if text.isspace() and not self._in(Kind.TEXT):
            self._space.append(text)
        elif text:
            held = "".join(self._space)
            self._space.clear()
            yield from self._extend(Kind.TEXT, held + text)

    def _in(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind is kind

    def _extend(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if not self._in(kind):
            yield from self._begin(kind)
        yield from self._grow(text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close(True)
        self._open = Block(kind, len(self.all), call_id, name)
        self.all.append(self._open)
        yield Opened(self._open)

    def _grow(self, text: str) -> Iterator[Change]:
        if self._open is not None and text:
            self._open.grow(text)
            yield Grown(self._open, text)

    def _close(self, complete: bool) -> Iterator[Change]:
        block, self._open = self._open, None
        if block is not None:
            block.complete = complete
            yield Closed(block)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of an answer. `called`: to have its tool calls answered."""

    finish: FinishReason
    stop_reason: int | str | None
    called: bool


class BlockWriter(Protocol):
    """Writer of one API's answers."""

    # See `request.receivers.Encoder`.
    filler: bytes

    def head(self, usage: Usage) -> bytes:
        """Return the start of a stream. `usage`: so far."""
        ...

    def change(self, change: Change) -> bytes: ...

    def idle(self) -> bytes:
        """Return a keep-alive."""
        ...

    def tail(self, blocks: list[Block], ending: Ending, usage: Usage) -> bytes: ...

    def failure(self, blocks: list[Block], error: ApiError, usage: Usage) -> bytes: ...

    def whole(self, blocks: list[Block], ending: Ending, usage: Usage) -> dict[str, Any]: ...


class _Answer:
    """Blocks of a job's only choice."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.ending: Ending | None = None

    def add(self, piece: ChoicePart) -> Iterator[Change]:
        for event in piece.as_events():
            yield from self.blocks.add(event)
        if piece.finish is not None:
            yield from self.blocks.end(complete=piece.finish is FinishReason.STOP)
            self.ending = Ending(piece.finish, piece.stop_reason, piece.ended_by_call)


class BlockEncoder:
    """Encoder of block events, see `request.receivers.Encoder`. A stream begins with the first token or keep-alive."""

    def __init__(self, job: Job, writer: BlockWriter, usage: Callable[[], Usage]) -> None:
        assert job.stream is not None and job.num_choices == 1
        self.filler = writer.filler
        self.due: list[ChoiceBuffer] = []
        self._interval = job.stream.interval
        self._writer = writer
        self._usage = usage
        self._choices = Choices(job)
        self._answer = _Answer()
        self._begun = False

    def plain(self, prompt: int, chunk: SequenceChunk) -> None:
        """Return None: the events of a text depend on the previous ones."""

    def add(self, prompt: int, chunk: SequenceChunk) -> bool:
        choice = self._choices.add(prompt, chunk)
        if chunk.finish_reason is None and choice.waiting < (self._interval if choice.opened else 1):
            return False
        self.due = [choice]
        return True

    def take(self) -> list[ChoicePart]:
        due, self.due = self.due, []
        return [choice.take() for choice in due]

    def encode(self, taken: list[ChoicePart]) -> bytes:
        head = self._head()
        changes = [self._writer.change(change) for piece in taken for change in self._answer.add(piece)]
        return head + b"".join(changes)

    def idle(self) -> bytes:
        return self._head() + self._writer.idle()

    def tail(self, usage: Usage) -> bytes:
        assert self._answer.ending is not None, "every choice has finished"
        return self._writer.tail(self._answer.blocks.all, self._answer.ending, usage)

    def failure(self, error: ApiError) -> bytes:
        head = self._head()
        return head + self._writer.failure(self._answer.blocks.all, error, self._usage())

    def _head(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._writer.head(self._usage())


class BlockBody:
    """Builder of a whole answer, see `request.receivers.Body`."""

    takes_long = False

    def __init__(self, job: Job, writer: BlockWriter) -> None:
        self._writer = writer
        self._choices = Choices(job)

    def add(self, prompt: int, chunk: SequenceChunk) -> None:
        self._choices.add(prompt, chunk)

    def body(self, usage: Usage) -> dict[str, Any]:
        answer = _Answer()
        for _ in answer.add(self._choices.all[0].take()):
            pass  # only the final blocks matter
        assert answer.ending is not None, "every choice has finished"
        return self._writer.whole(answer.blocks.all, answer.ending, usage)


def sse(event: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), data)
