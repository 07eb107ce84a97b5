"""Server-sent events of a stream, as bytes. What does not change from event to event is encoded once."""

from collections.abc import Callable

from orjson import dumps

from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.formats.choice import Choice, Choices, Piece
from roseinfer.server.request.account import Usage
from roseinfer.server.request.job import Job, Kind, StreamChoices
from roseinfer.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
# What is before and behind the text in an event that has nothing else to say.
_PLAIN = {
    Kind.COMPLETION: (b'{"index":%d,"text":', b',"logprobs":null,"finish_reason":null}]}\n\n'),
    Kind.CHAT: (b'{"index":%d,"delta":{"content":', b'},"finish_reason":null}]}\n\n'),
}


class EventEncoder:
    """Turns engine chunks into events: an event per token, a finish event per choice, usage and `[DONE]` at the end.

    `add` each chunk; what it returns is `taken` and then `encode`d, in any thread, in that order.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, usage: Callable[[], Usage]) -> None:
        assert job.stream is not None
        self._job = job
        self._options: StreamChoices = job.stream
        self._usage = usage
        self._choices = Choices(job, tokenizer)
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            dumps(job.id),
            dumps(job.kind.chunk_object),
            job.created,
            dumps(job.model),
        )
        self._once = b',"warnings":' + dumps(job.warnings) if job.warnings else b""
        completion = job.kind is Kind.COMPLETION
        self._delta = _completion_delta if completion else _chat_delta
        self._finish = _completion_finish if completion else _chat_finish
        before, self._after = _PLAIN[job.kind]
        self._before = [self._head + before % index for index in range(job.num_choices)] if self._only_text() else []

    def _only_text(self) -> bool:
        """As most streams are: all of an event but the text itself is known beforehand."""
        job, options = self._job, self._options
        told = job.logprobs is not None or job.return_token_ids or options.continuous_usage
        return not told and options.interval == 1

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

    def add(self, prompt: int, chunk: SequenceChunk) -> Choice | None:
        """The choice that has something to say now; None if it waits for more (`stream_interval`)."""
        choice = self._choices.add(prompt, chunk)
        if chunk.finish_reason is None and choice.waiting < (self._options.interval if choice.opened else 1):
            return None
        return choice

    def encode(self, choice: Choice, piece: Piece) -> bytes:
        events = b""
        if piece.first and self._job.kind is Kind.CHAT:
            events = self._role(choice)
        if piece.finish is None or self._has_news(piece):
            events += self._event(self._delta(choice, piece, self._job))
        if piece.finish is not None:
            events += self._event(self._finish(choice.index, piece.finish, piece.stop_reason))
        return events

    def tail(self, usage: Usage) -> bytes:
        """The end of a stream in which every choice has finished."""
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + dumps(usage.as_dict()) + self._take_once() + b"}\n\n" + DONE

    def _has_news(self, piece: Piece) -> bool:
        """Whether a finished choice has something left to say: the token that ended it may have no text."""
        if piece.text or piece.entries or (piece.token_ids and self._job.return_token_ids):
            return True
        return self._job.echo and piece.first

    def _role(self, choice: Choice) -> bytes:
        body = b'{"index":%d,"delta":{"role":"assistant","content":""},"finish_reason":null}' % choice.index
        if not self._job.return_token_ids:
            return self._event(body)
        return self._event(body, b',"prompt_token_ids":' + dumps(choice.prompt.ids))

    def _event(self, choice: bytes, more: bytes = b"") -> bytes:
        if self._options.continuous_usage:
            more += b',"usage":' + dumps(self._usage().as_dict())
        if self._once:
            more += self._take_once()
        return b"%b%b]%b}\n\n" % (self._head, choice, more)

    def _take_once(self) -> bytes:
        once, self._once = self._once, b""
        return once


def _completion_delta(choice: Choice, piece: Piece, job: Job) -> bytes:
    echo = job.echo and piece.first
    text = piece.text
    logprobs = b"null" if job.logprobs is None else dumps(choice.logprobs(piece, with_prompt=echo))
    ids = b""
    if job.return_token_ids:
        ids = b',"token_ids":' + dumps(piece.token_ids)
        if piece.first:
            ids += b',"prompt_token_ids":' + dumps(choice.prompt.ids)
    if echo:
        text = choice.prompt.text + text
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}' % (choice.index, dumps(text), logprobs, ids)


def _chat_delta(choice: Choice, piece: Piece, job: Job) -> bytes:
    more = b""
    if job.logprobs is not None:
        more = b',"logprobs":' + dumps(choice.logprobs(piece))
    if job.return_token_ids:
        more += b',"token_ids":' + dumps(piece.token_ids)
    return b'{"index":%d,"delta":{"content":%b},"finish_reason":null%b}' % (choice.index, dumps(piece.text), more)


def _completion_finish(index: int, reason: FinishReason, stop_reason: int | str | None) -> bytes:
    return b'{"index":%d,"text":"","logprobs":null,"finish_reason":"%b","stop_reason":%b}' % (
        index,
        reason.value.encode(),
        dumps(stop_reason),
    )


def _chat_finish(index: int, reason: FinishReason, stop_reason: int | str | None) -> bytes:
    return b'{"index":%d,"delta":{},"finish_reason":"%b","stop_reason":%b}' % (
        index,
        reason.value.encode(),
        dumps(stop_reason),
    )
