"""Answers in OpenAI's shape, whole or as server-sent events: what chat and completions have in common.

What differs between the two is a `Writer`. What does not change from event to event is encoded once.
"""

from collections.abc import Callable
from typing import Any, Protocol

from orjson import dumps

from roseinfer.engine.api import SequenceChunk
from roseinfer.server.formats.choices import Choice, Choices, Piece
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.account import Usage
from roseinfer.server.request.job import Job, StreamChoices

DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """How one API writes a choice, as the JSON of an event or as a part of a whole answer."""

    whole_object: str
    chunk_object: str
    # What is before (with a place for the choice's index) and behind the text in an event that has nothing else to say.
    plain: tuple[bytes, bytes]

    def opening(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """An event before the choice's first one: (the choice, what is said beside it). None: there is none."""
        ...

    def delta(self, choice: Choice, piece: Piece) -> bytes: ...

    def finish(self, choice: Choice, piece: Piece) -> bytes: ...

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]: ...

    def about(self, choices: Choices) -> dict[str, Any]:
        """Fields of a whole answer beside its choices."""
        ...


class EventEncoder:
    """Turns engine chunks into events: an event per token, a finish event per choice, usage and `[DONE]` at the end.

    `add` each chunk; what is then `due` is `taken` and `encode`d, in any thread, in that order.
    """

    def __init__(self, job: Job, writer: Writer, usage: Callable[[], Usage]) -> None:
        assert job.stream is not None
        self._job = job
        self._options: StreamChoices = job.stream
        self._writer = writer
        self._usage = usage
        self._choices = Choices(job)
        self._due: dict[Choice, None] = {}
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            dumps(job.id),
            dumps(writer.chunk_object),
            job.created,
            dumps(job.model),
        )
        self._once = b',"warnings":' + dumps(job.warnings) if job.warnings else b""
        before, self._after = writer.plain
        self._before = [self._head + before % index for index in range(job.num_choices)] if self._only_text() else []

    def _only_text(self) -> bool:
        """As most streams are: all of an event but the text itself is known beforehand."""
        job, options = self._job, self._options
        told = job.logprobs is not None or job.return_token_ids or options.continuous_usage
        return not told and options.interval == 1

    @property
    def due(self) -> bool:
        """Whether some choice has something to say."""
        return bool(self._due)

    def plain(self, prompt: int, chunk: SequenceChunk) -> bytes | None:
        """The event of a chunk that brings nothing but text to a choice that has begun and of which nothing waits.

        None if this is no such chunk: then `add` it.
        """
        index = prompt * self._job.n + chunk.index
        if not self._before or not chunk.token_ids or chunk.finish_reason is not None:
            return None
        if not self._choices.all[index].opened:
            return None
        return self._before[index] + dumps(chunk.text) + self._after

    def add(self, prompt: int, chunk: SequenceChunk) -> bool:
        """Whether the chunk's choice has something to say now; else it waits for more (`stream_interval`)."""
        choice = self._choices.add(prompt, chunk)
        if chunk.finish_reason is None and choice.waiting < (self._options.interval if choice.opened else 1):
            return False
        self._due[choice] = None
        return True

    def take(self) -> list[tuple[Choice, Piece]]:
        due, self._due = self._due, {}
        return [(choice, choice.take()) for choice in due]

    def encode(self, taken: list[tuple[Choice, Piece]]) -> bytes:
        return b"".join([self._encode(choice, piece) for choice, piece in taken])

    def _encode(self, choice: Choice, piece: Piece) -> bytes:
        events = b""
        opening = self._writer.opening(choice) if piece.first else None
        if opening is not None:
            events = self._event(*opening)
        if piece.finish is None or self._has_news(piece):
            events += self._event(self._writer.delta(choice, piece))
        if piece.finish is not None:
            events += self._event(self._writer.finish(choice, piece))
        return events

    def tail(self, usage: Usage) -> bytes:
        """The end of a stream in which every choice has finished."""
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + dumps(usage.as_dict()) + self._take_once() + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that failed."""
        return b"data: " + error.body() + b"\n\n"

    def _has_news(self, piece: Piece) -> bool:
        """Whether a finished choice has something left to say: the token that ended it may have no text."""
        if piece.text or piece.entries or (piece.token_ids and self._job.return_token_ids):
            return True
        return self._job.echo and piece.first

    def _event(self, choice: bytes, more: bytes = b"") -> bytes:
        if self._options.continuous_usage:
            more += b',"usage":' + dumps(self._usage().as_dict())
        if self._once:
            more += self._take_once()
        return b"%b%b]%b}\n\n" % (self._head, choice, more)

    def _take_once(self) -> bytes:
        once, self._once = self._once, b""
        return once


class WholeBody:
    """Gathers engine chunks for an answer in one piece; `body` when every choice has finished."""

    def __init__(self, job: Job, writer: Writer) -> None:
        self._job = job
        self._writer = writer
        self._choices = Choices(job)

    def add(self, prompt: int, chunk: SequenceChunk) -> None:
        self._choices.add(prompt, chunk)

    def body(self, usage: Usage) -> dict[str, Any]:
        job, writer = self._job, self._writer
        body = {
            "id": job.id,
            "object": writer.whole_object,
            "created": job.created,
            "model": job.model,
            "choices": [writer.whole(choice, choice.take()) for choice in self._choices.all],
            "usage": usage.as_dict(),
        } | writer.about(self._choices)
        if job.warnings:
            body["warnings"] = list(job.warnings)
        return body
