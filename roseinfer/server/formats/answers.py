"""Answers of chat and completions, whole or as server-sent events.

Streams and whole answers both read `Choices`, so they cannot differ: text of each choice, or parsed events (reasoning,
text, tool calls). A `Writer` has what differs between chat and completions. Constant parts of events are encoded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orjson import dumps

from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import TokenLogprobs
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.job import Job, StreamChoices, Usage
from roseinfer.text.output import CallEnd, Event, Text, joined
from roseinfer.text.tokenizer import Tokenizer

# --- choices --------------------------------------------------------------------------------------------------------
Entries = Sequence[TokenLogprobs | None]
# JSON has no infinity.
MIN_LOGPROB = -9999.0


@dataclass(slots=True)
class ChoicePart:
    """New part of a choice. `first`: it is the first part.

    `events`: merged parser events, None for plain text. `text`: the content only. `called`: the choice has a complete
    tool call so far.
    """

    text: str
    token_ids: list[int]
    entries: list[TokenLogprobs]
    first: bool
    finish: FinishReason | None
    stop_reason: int | str | None
    events: list[Event] | None = None
    called: bool = False

    @property
    def ended_by_call(self) -> bool:
        """True if the choice ended to have its tool calls answered, not by length or a stop string."""
        return self.called and self.finish is FinishReason.STOP and not isinstance(self.stop_reason, str)

    def as_events(self) -> list[Event]:
        """Return its events; for plain text, one event if there is any."""
        if self.events is not None:
            return self.events
        return [Text(self.text)] if self.text else []


class ChoiceBuffer:
    """Buffer of the chunks of choice `index` of a job until `take`. `echo_text`: the prompt's text to echo."""

    def __init__(self, job: Job, index: int) -> None:
        position = index // job.n
        self.prompt = job.prompts[position]
        self.index = index
        self.echo_text = job.echo_texts[position] if job.echo_texts else ""
        self.opened = False
        self.prompt_entries: list[TokenLogprobs | None] | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._entries: list[TokenLogprobs] = []
        self._events: list[Event] | None = None if job.parser is None else []
        self._called = False
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None

    @property
    def waiting(self) -> int:
        """Tokens since the last `take`."""
        return len(self._token_ids)

    def add(self, chunk: SequenceChunk) -> None:
        if chunk.text:
            self._text.append(chunk.text)
        self._token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self._entries += chunk.logprobs
        if chunk.events and self._events is not None:
            self._events += chunk.events
        if chunk.finish_reason is not None:
            self._finish, self._stop_reason = chunk.finish_reason, chunk.stop_reason

    def take(self) -> ChoicePart:
        first, self.opened = not self.opened, True
        text = "".join(self._text)
        piece = ChoicePart(text, self._token_ids, self._entries, first, self._finish, self._stop_reason)
        self._text, self._token_ids, self._entries = [], [], []
        if self._events is not None:
            self._take_events(piece, self._events)
            self._events = []
        return piece

    def _take_events(self, piece: ChoicePart, events: list[Event]) -> None:
        self._called = self._called or any(type(event) is CallEnd and event.complete for event in events)
        piece.events = joined(events) if len(events) > 1 else events
        piece.called = self._called


class Choices:
    """Choices of a job by (prompt, sample). Prompt logprobs are set in every sample of their prompt."""

    def __init__(self, job: Job) -> None:
        self._n = job.n
        self.all = [ChoiceBuffer(job, index) for index in range(job.num_choices)]

    def add(self, prompt: int, chunk: SequenceChunk) -> ChoiceBuffer:
        choice = self.all[prompt * self._n + chunk.index]
        if chunk.prompt_logprobs is not None:
            # Fewer than the prompt's tokens after a timeout during the prompt.
            unscored = len(choice.prompt.ids) - len(chunk.prompt_logprobs)
            entries = chunk.prompt_logprobs + [None] * unscored
            for sibling in self.all[prompt * self._n : (prompt + 1) * self._n]:
                sibling.prompt_entries = entries
        choice.add(chunk)
        return choice


# --- tokens and their log probabilities -------------------------------------------------------------------------
class TokenNames:
    """Names of tokens: their text, or `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self.tokenizer.token_str(token)

    def bytes(self, token: int) -> list[int]:
        return list(self.tokenizer.token_bytes(token))


def about_prompt(job: Job, names: TokenNames, choice: ChoiceBuffer) -> dict[str, Any]:
    """Return the requested log probabilities and token ids of the choice's prompt."""
    about: dict[str, Any] = {}
    if job.prompt_logprobs is not None:
        plain = TokenNames(names.tokenizer, as_ids=False)
        entries = choice.prompt_entries or []
        about["prompt_logprobs"] = prompt_logprobs(plain, job.prompt_logprobs, entries)
    if job.return_token_ids:
        about["prompt_token_ids"] = choice.prompt.ids
    return about


def prompt_logprobs(names: TokenNames, top: int, entries: Entries) -> list[dict[str, Any] | None]:
    """Return, per prompt token, token id -> logprob, rank (1 = most likely) and text; None for the first token."""
    return [None if entry is None else _by_id(names, top, entry) for entry in entries]


def _by_id(names: TokenNames, top: int, entry: TokenLogprobs) -> dict[str, Any]:
    found = {}
    for position, (token, logprob) in enumerate(first(entry.top, top)):
        found[str(token)] = {"logprob": finite(logprob), "rank": position + 1, "decoded_token": names(token)}
    own = {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": names(entry.token_id)}
    found.setdefault(str(entry.token_id), own)
    return found


def first(top: tuple[tuple[int, float], ...], count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely alternatives, all for -1."""
    return top if count < 0 else top[:count]


def finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


DONE = b"data: [DONE]\n\n"
# Comments are skipped by clients.
KEEP_ALIVE = b": keep-alive\n\n"


class Writer(Protocol):
    """Writer of one API's choices, as JSON of events or parts of a whole answer."""

    whole_object: str
    chunk_object: str
    # Bytes before (with a place for the choice's index) and after the text in an event with text only.
    plain: tuple[bytes, bytes]

    def opening(self, choice: ChoiceBuffer) -> tuple[bytes, bytes] | None:
        """Return an event before the choice's first one: (choice, further fields), or None."""
        ...

    def delta(self, choice: ChoiceBuffer, piece: ChoicePart) -> bytes: ...

    def finish(self, choice: ChoiceBuffer, piece: ChoicePart) -> bytes: ...

    def whole(self, choice: ChoiceBuffer, piece: ChoicePart) -> dict[str, Any]: ...

    def about(self, choices: Choices) -> dict[str, Any]:
        """Return fields of a whole answer besides its choices."""
        ...


class EventEncoder:
    """Encoder of events: one per token, a finish event per choice, usage and `[DONE]` at the end.

    See `request.receivers.Encoder`.
    """

    filler = KEEP_ALIVE

    def __init__(self, job: Job, writer: Writer, usage: Callable[[], Usage]) -> None:
        assert job.stream is not None
        self._job = job
        self._options: StreamChoices = job.stream
        self._writer = writer
        self._usage = usage
        self._choices = Choices(job)
        self.due: dict[ChoiceBuffer, None] = {}  # choices with news
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            dumps(job.id),
            dumps(writer.chunk_object),
            job.created,
            dumps(job.model),
        )
        self._once = b',"warnings":' + dumps(job.warnings) if job.warnings else b""
        before, self._after = writer.plain
        varies = job.logprobs is not None or job.return_token_ids or job.stream.continuous_usage
        # In most streams all of an event but its text is constant.
        only_text = not varies and job.stream.interval == 1
        self._before = [self._head + before % index for index in range(job.num_choices)] if only_text else []

    def plain(self, prompt: int, chunk: SequenceChunk) -> bytes | None:
        """Encode a chunk of text alone, for a choice that has begun and has nothing waiting; None: use `add`."""
        index = prompt * self._job.n + chunk.index
        if not self._before or not chunk.token_ids or chunk.finish_reason is not None:
            return None
        if not self._choices.all[index].opened:
            return None
        if chunk.events is not None and not _is_text(chunk.events):
            return None
        return self._before[index] + dumps(chunk.text) + self._after

    def add(self, prompt: int, chunk: SequenceChunk) -> bool:
        """Add a chunk; return True if its choice is due now, False if it waits for more (`stream_interval`)."""
        choice = self._choices.add(prompt, chunk)
        if chunk.finish_reason is None and choice.waiting < (self._options.interval if choice.opened else 1):
            return False
        self.due[choice] = None
        return True

    def take(self) -> list[tuple[ChoiceBuffer, ChoicePart]]:
        due, self.due = self.due, {}
        return [(choice, choice.take()) for choice in due]

    def encode(self, taken: list[tuple[ChoiceBuffer, ChoicePart]]) -> bytes:
        return b"".join([self._encode(choice, piece) for choice, piece in taken])

    def _encode(self, choice: ChoiceBuffer, piece: ChoicePart) -> bytes:
        events = b""
        opening = self._writer.opening(choice) if piece.first else None
        if opening is not None:
            events = self._event(*opening)
        if piece.finish is None or self._has_news(piece):
            events += self._event(self._writer.delta(choice, piece))
        if piece.finish is not None:
            events += self._event(self._writer.finish(choice, piece))
        return events

    def idle(self) -> bytes:
        return KEEP_ALIVE

    def tail(self, usage: Usage) -> bytes:
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + dumps(usage.as_dict()) + self._take_once() + b"}\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _has_news(self, piece: ChoicePart) -> bool:
        """True if a finished choice has content left: its last token may have no text."""
        if piece.text or piece.events or piece.entries or (piece.token_ids and self._job.return_token_ids):
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


def _is_text(events: list[Event]) -> bool:
    return len(events) == 1 and type(events[0]) is Text


class WholeBody:
    """Builder of a whole answer. See `request.receivers.Body`."""

    def __init__(self, job: Job, writer: Writer) -> None:
        self._job = job
        self._writer = writer
        self._choices = Choices(job)

    @property
    def takes_long(self) -> bool:
        """True if there are lists of log probabilities."""
        return self._job.logprobs is not None or self._job.prompt_logprobs is not None

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
