"""Server-sent events of a stream, as bytes. What does not change from chunk to chunk is encoded once."""

from collections.abc import Callable

from orjson import dumps

from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.account import Usage
from roseinfer.server.choice import Choice, Choices
from roseinfer.server.job import Job, Kind, StreamChoices
from roseinfer.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class EventEncoder:
    """Turns engine chunks into events: an event per token, a finish event per choice, usage and `[DONE]` at the end."""

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
        self._delta = _completion_delta if job.kind is Kind.COMPLETION else _chat_delta
        self._finish = _completion_finish if job.kind is Kind.COMPLETION else _chat_finish

    def feed(self, prompt: int, chunk: SequenceChunk) -> bytes:
        """The events that `chunk` completes, b'' if it waits for more (`stream_interval`)."""
        choice = self._choices.add(prompt, chunk)
        finish = chunk.finish_reason
        if finish is None and len(choice.token_ids) < (self._options.interval if choice.opened else 1):
            return b""
        events = b""
        if not choice.opened:
            events = self._role(choice) if self._job.kind is Kind.CHAT else b""
        if finish is None or self._has_news(choice):
            events += self._event(self._delta(choice, self._job))
        choice.opened = True
        choice.clear()
        if finish is not None:
            events += self._event(self._finish(choice.index, finish, chunk.stop_reason))
        return events

    def tail(self) -> bytes:
        """The end of a stream in which every choice has finished."""
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + dumps(self._usage().as_dict()) + self._take_once() + b"}\n\n" + DONE

    def _has_news(self, choice: Choice) -> bool:
        """Whether a finished choice has something left to say: the token that ended it may have no text."""
        if choice.text or choice.entries or (choice.token_ids and self._job.return_token_ids):
            return True
        return self._job.echo and not choice.opened

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


def _completion_delta(choice: Choice, job: Job) -> bytes:
    echo = job.echo and not choice.opened
    text = "".join(choice.text)
    logprobs = b"null" if job.logprobs is None else dumps(choice.logprobs(with_prompt=echo))
    ids = b""
    if job.return_token_ids:
        ids = b',"token_ids":' + dumps(choice.token_ids)
        if not choice.opened:
            ids += b',"prompt_token_ids":' + dumps(choice.prompt.ids)
    if echo:
        text = choice.prompt.text + text
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}' % (choice.index, dumps(text), logprobs, ids)


def _chat_delta(choice: Choice, job: Job) -> bytes:
    more = b""
    if job.logprobs is not None:
        more = b',"logprobs":' + dumps(choice.logprobs())
    if job.return_token_ids:
        more += b',"token_ids":' + dumps(choice.token_ids)
    text = dumps("".join(choice.text))
    return b'{"index":%d,"delta":{"content":%b},"finish_reason":null%b}' % (choice.index, text, more)


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
