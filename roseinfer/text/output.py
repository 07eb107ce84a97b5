"""Parsed output of a model: reasoning, text and tool calls, as events in order of arrival.

One parser per sample turns text into these events. Streams send them and whole answers join them, so both agree.
"""

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct


class Reasoning(Struct, frozen=True):
    """Part of the model's reasoning before its answer, without the marks around it."""

    text: str


class Text(Struct, frozen=True):
    """Part of the answer's content."""

    text: str


class TextBreak(Struct, frozen=True):
    """End of a text that is a message of its own. Another text follows."""


class CallStart(Struct, frozen=True):
    """Beginning of a tool call. `index` counts the calls of a sample from 0. The name is complete, but
    may be unknown.
    """

    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """Next part of the arguments of call `index`. All parts together are JSON."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
    """End of call `index`, once per call.

    complete: True if its arguments are a whole JSON object. Otherwise the output ended within the call, or it is
    malformed.
    """

    index: int
    complete: bool = True


Event = Reasoning | Text | TextBreak | CallStart | CallArguments | CallEnd


class OutputParser(Protocol):
    """Parser of one sample. Its input must include special tokens; no input makes it raise.

    The text of all events together does not depend on how the output is split into pieces.
    """

    @property
    def markers(self) -> frozenset[int]:
        """Special tokens that the parser needs as text, each fed separately, even where special tokens are hidden. For
        other special tokens it gets the id with an empty text.
        """
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Tokens fed so far that belong to the reasoning, including its end mark."""
        ...

    @property
    def failures(self) -> int:
        """Number of malformed tool calls so far."""
        ...

    def feed(self, text: str, token_id: int | None) -> list[Event]:
        """Parse the text that `token_id` added; it may be empty, or begin with text that was withheld before.

        Without an id the tokens are unknown, and markers are recognised by their text.
        """
        ...

    def end(self) -> list[Event]:
        """Return what was withheld, and the ends of unfinished calls."""
        ...


def joined(events: Iterable[Event]) -> list[Event]:
    """Merge neighbouring events of one kind."""
    merged: list[Event] = []
    texts: list[str] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Reasoning | Text | CallArguments):
            if _continues(last, event):
                texts.append(event.text)
                continue
            _close(merged, texts)
            texts = [event.text]
        else:
            _close(merged, texts)
            texts = []
        merged.append(event)
    _close(merged, texts)
    return merged


def _continues(last: Event | None, event: Reasoning | Text | CallArguments) -> bool:
    if type(last) is not type(event):
        return False
    return not isinstance(last, CallArguments) or not isinstance(event, CallArguments) or last.index == event.index


def _close(merged: list[Event], texts: list[str]) -> None:
    """Set the last event's text to all of its parts."""
    if len(texts) < 2:
        return
    last, text = merged[-1], "".join(texts)
    if isinstance(last, CallArguments):
        merged[-1] = CallArguments(last.index, text)
    elif isinstance(last, Reasoning):
        merged[-1] = Reasoning(text)
    else:
        merged[-1] = Text(text)
