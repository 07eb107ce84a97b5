"""One streamed request to a server of the OpenAI API, as its client sees it."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Clock = Callable[[], float]

MAX_ERROR_CHARS = 300
DONE = b"[DONE]"
# Errors of answers that begin but end badly without an error event.
NO_FINISH_REASON = "cut off: the stream ended without a finish_reason"
NO_DONE = "cut off: the stream ended without [DONE]"
NO_USAGE = "the stream ended without a usage"
_FINISHED = (b'"finish_reason":"', b'"finish_reason": "')
_USAGE = (b'"usage":{', b'"usage": {')
_NO_TEXT = (b'"text":""', b'"text": ""')
_NO_TOKEN = (b'"delta":{}', b'"delta": {}')


@dataclass(slots=True, kw_only=True)
class Exchange:
    """Client-side record of one request.

    `due_s`, `start_s`, `end_s`: seconds after the load began. `chunk_s`: when each chunk was read, seconds after the
    request was sent. `chunk_tokens`: tokens of each chunk, if the server counts them. `output_tokens`: from the
    server's usage, else the number of chunks. `ok`: the stream had a finish reason, a usage and [DONE]. `code`,
    `cause`: of the error that the server answered.
    """

    due_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    status: int | None = None
    error: str | None = None
    code: str | None = None
    cause: str | None = None
    ok: bool = False
    output_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)

    @property
    def refusal(self) -> str:
        """Status, code and cause: the key by which refusals are counted, since their messages contain figures."""
        cause = f" ({self.cause})" if self.cause else ""
        return f"{self.status} {self.code or 'without a code'}{cause}"

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def latency_s(self) -> float:
        return self.chunk_s[-1]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks, or between tokens if the server counts them.

        A chunk of k tokens that came after t seconds counts as k gaps of t / k.
        """
        gaps = [later - earlier for earlier, later in pairwise(self.chunk_s)]
        if len(self.chunk_tokens) != len(self.chunk_s):
            return gaps
        counted = zip(gaps, self.chunk_tokens[1:], strict=True)
        return [gap / tokens for gap, tokens in counted for _ in range(tokens)]

    @property
    def client_queue_s(self) -> float:
        """Time that the request waited in the client after it was due."""
        return self.start_s - self.due_s


class EventReader:
    """Splitter of a body, in pieces of any size, into server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the contents of the `data:` lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


async def send_request(
    session: Any,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    record: Exchange,
    began_s: float,
    *,
    clock: Clock = time.monotonic,
    gate: AbstractAsyncContextManager[Any] | None = None,
    texts: bool = False,
) -> None:
    """Send `body` when `record` is due and `gate` is free, and fill in `record`. `texts`: store the answer's text.

    Server errors are results and are not raised. Nothing is retried.
    """
    await asyncio.sleep(max(0.0, began_s + record.due_s - clock()))
    async with gate or nullcontext():
        sent_s = clock()
        record.start_s = sent_s - began_s
        try:
            async with session.post(url, data=body, headers=headers) as response:
                record.status = response.status
                if response.status == 200:
                    await _read(response, record, sent_s, clock, texts)
                else:
                    text = await response.text()
                    record.error = text[:MAX_ERROR_CHARS]
                    record.code, record.cause = error_field(text, "code"), error_field(text, "cause")
        except Exception as error:
            record.error = repr(error)[:MAX_ERROR_CHARS]
        record.end_s = clock() - began_s


async def _read(response: Any, record: Exchange, sent_s: float, clock: Clock, texts: bool) -> None:
    reader, stream = EventReader(), _Stream(record, texts)
    try:
        async for data in response.content.iter_any():
            now_s = clock() - sent_s
            for event in reader.feed(data):
                stream.take(event, now_s)
                if stream.is_over:
                    break
            if stream.is_over:
                break
    finally:
        stream.count_tokens()
    stream.judge()


class _Stream:
    """Stream of one answer: fills in its record, event by event."""

    def __init__(self, record: Exchange, texts: bool) -> None:
        self._record, self._texts = record, texts
        self._usage: int | None = None
        self._is_done = self._is_finished = self._ends_bare = False

    @property
    def is_over(self) -> bool:
        """True after [DONE] or an error: later events do not count."""
        return self._is_done or self._record.error is not None

    def take(self, event: bytes, now_s: float) -> None:
        """Take one event, read `now_s` after the request was sent."""
        record = self._record
        if event == DONE:
            self._is_done = True
            return
        if b'"error"' in event[:12]:
            record.error = event[:MAX_ERROR_CHARS].decode(errors="replace")
            return
        if any(mark in event for mark in _FINISHED):
            self._is_finished = True
            self._ends_bare = self._ends_bare or any(mark in event for mark in _NO_TEXT)
        tokens, has_output = read_event(event)
        if has_output:
            record.chunk_s.append(now_s)
            if tokens is not None:
                record.chunk_tokens.append(tokens - (self._usage or 0))
        self._usage = self._usage if tokens is None else tokens
        if self._texts:
            _add_text(event, record)

    def count_tokens(self) -> None:
        """Set the number of tokens, also of a stream that broke off."""
        self._record.output_tokens = len(self._record.chunk_s) if self._usage is None else self._usage

    def judge(self) -> None:
        """Set whether the stream is complete, and what it lacks."""
        record = self._record
        if self._ends_bare and record.output_tokens < len(record.chunk_s) and not record.chunk_tokens:
            record.chunk_s.pop()  # a finish reason without a token: its time would be a gap without one
        if record.error is None:
            record.error = self._lacks()
            record.ok = record.error is None

    def _lacks(self) -> str | None:
        if not self._is_done:
            return NO_DONE
        if not self._is_finished:
            return NO_FINISH_REASON
        return NO_USAGE if self._usage is None else None


def read_event(event: bytes) -> tuple[int | None, bool]:
    """Return the completion tokens so far, if the event has a usage, and whether the event has output.

    Events without a usage are not parsed.
    """
    if not any(mark in event for mark in _USAGE):
        return None, _has_output(event)
    content = json.loads(event)
    usage = content.get("usage")
    return usage["completion_tokens"] if usage else None, bool(content.get("choices")) and _has_output(event)


def _has_output(event: bytes) -> bool:
    """True unless the chunk has only the role or only the finish reason (both of chats)."""
    if any(mark in event for mark in _NO_TOKEN):
        return False
    return not (b'"role"' in event and (b'"content":""' in event or b'"content": ""' in event))


def _add_text(event: bytes, record: Exchange) -> None:
    for choice in json.loads(event).get("choices", ()):
        record.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        record.finish_reason = choice.get("finish_reason") or record.finish_reason


def error_field(text: str, name: str) -> str | None:
    """Return the `code` or `cause` of an error's body, or None."""
    try:
        value = json.loads(text)["error"][name]
    except (ValueError, LookupError, TypeError):
        return None
    return None if value is None else str(value)[:MAX_ERROR_CHARS]
