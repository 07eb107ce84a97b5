"""One streamed request to a server of the OpenAI API, and what its client saw of it."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Clock = Callable[[], float]

ERROR_CHARACTERS = 300
DONE = b"[DONE]"
# How an answer that began may end badly without an error of its own.
NO_FINISH_REASON = "cut off: the stream ended without a finish_reason"
NO_DONE = "cut off: the stream ended without [DONE]"
NO_USAGE = "the stream ended without a usage"
_FINISHED = (b'"finish_reason":"', b'"finish_reason": "')
_USAGE = (b'"usage":{', b'"usage": {')
_NO_TEXT = (b'"text":""', b'"text": ""')
_NO_TOKEN = (b'"delta":{}', b'"delta": {}')


@dataclass(slots=True, kw_only=True)
class Exchange:
    """What became of one request, at its client.

    `due_s`, `start_s`, `end_s`: seconds after the load began. `chunk_s`: when each chunk was read, seconds after the
    request was sent; `chunk_tokens`: the tokens of each, where the server counts them. `output_tokens`: as the server's
    usage says, else the number of chunks. `ok`: the stream had a finish reason, a usage and its [DONE]. `code` and
    `cause`: of the error it was refused with.
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
        """Status, code and cause: what refusals are counted by, as their texts differ by the figures in them."""
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
        """Mean time of a token after the first; 0 if there is no second."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between chunks; where their tokens are counted, those between tokens: a chunk of k tokens that came
        after t seconds gives k gaps of t / k."""
        gaps = [later - earlier for earlier, later in pairwise(self.chunk_s)]
        if len(self.chunk_tokens) != len(self.chunk_s):
            return gaps
        counted = zip(gaps, self.chunk_tokens[1:], strict=True)
        return [gap / tokens for gap, tokens in counted for _ in range(tokens)]

    @property
    def client_queue_s(self) -> float:
        """How long it waited in the client after it was due."""
        return self.start_s - self.due_s


class EventReader:
    """Server-sent events out of pieces of a body, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The contents of the `data:` lines that are complete by now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


async def exchange(
    session: Any,
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    seen: Exchange,
    began_s: float,
    *,
    clock: Clock = time.monotonic,
    gate: AbstractAsyncContextManager[Any] | None = None,
    texts: bool = False,
) -> None:
    """Send `body` once `seen` is due and `gate` lets it through, and fill `seen` in. `texts`: keep what is answered.

    Never raises for what the server does: that is a result. Nothing is tried twice.
    """
    await asyncio.sleep(max(0.0, began_s + seen.due_s - clock()))
    async with gate or nullcontext():
        sent_s = clock()
        seen.start_s = sent_s - began_s
        try:
            async with session.post(url, data=body, headers=headers) as response:
                seen.status = response.status
                if response.status == 200:
                    await _read(response, seen, sent_s, clock, texts)
                else:
                    text = await response.text()
                    seen.error = text[:ERROR_CHARACTERS]
                    seen.code, seen.cause = error_field(text, "code"), error_field(text, "cause")
        except Exception as error:
            seen.error = repr(error)[:ERROR_CHARACTERS]
        seen.end_s = clock() - began_s


async def _read(response: Any, seen: Exchange, sent_s: float, clock: Clock, texts: bool) -> None:
    reader = EventReader()
    usage: int | None = None
    finished = done = bare_end = False
    try:
        async for data in response.content.iter_any():
            now_s = clock() - sent_s
            for event in reader.feed(data):
                if event == DONE:
                    done = True
                    break
                if b'"error"' in event[:12]:
                    seen.error = event[:ERROR_CHARACTERS].decode(errors="replace")
                    break
                ends = any(mark in event for mark in _FINISHED)
                finished = finished or ends
                bare_end = bare_end or (ends and any(mark in event for mark in _NO_TEXT))
                tokens, chunk = read_event(event)
                if chunk:
                    seen.chunk_s.append(now_s)
                    if tokens is not None:
                        seen.chunk_tokens.append(tokens - (usage or 0))
                usage = usage if tokens is None else tokens
                if texts:
                    _keep_text(event, seen)
            if done or seen.error is not None:
                break
    finally:
        seen.output_tokens = len(seen.chunk_s) if usage is None else usage
    if bare_end and seen.output_tokens < len(seen.chunk_s) and not seen.chunk_tokens:
        seen.chunk_s.pop()  # it brought the finish reason and no token, whose time would be a gap of nothing
    if seen.error is None:
        seen.error = NO_DONE if not done else NO_FINISH_REASON if not finished else NO_USAGE if usage is None else None
        seen.ok = seen.error is None


def read_event(event: bytes) -> tuple[int | None, bool]:
    """(completion tokens up to here if the event has a usage, whether it brings something of a choice). Most events are
    not even parsed."""
    if not any(mark in event for mark in _USAGE):
        return None, _brings_output(event)
    content = json.loads(event)
    usage = content.get("usage")
    return usage["completion_tokens"] if usage else None, bool(content.get("choices")) and _brings_output(event)


def _brings_output(event: bytes) -> bool:
    """Not the chunk that only names the role, nor the one that only has the finish reason (both of chats)."""
    if any(mark in event for mark in _NO_TOKEN):
        return False
    return not (b'"role"' in event and (b'"content":""' in event or b'"content": ""' in event))


def _keep_text(event: bytes, seen: Exchange) -> None:
    for choice in json.loads(event).get("choices", ()):
        seen.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        seen.finish_reason = choice.get("finish_reason") or seen.finish_reason


def error_field(text: str, name: str) -> str | None:
    """What an error's body gives as its `code` or `cause`, if it does."""
    try:
        value = json.loads(text)["error"][name]
    except (ValueError, LookupError, TypeError):
        return None
    return None if value is None else str(value)[:ERROR_CHARACTERS]
