"""What an output says beyond plain text: reasoning, text and tool calls, as events in the order they come.

One parser per sample turns text into these events. Streams send them and whole answers fold them, so that the two
cannot differ.
"""

from collections.abc import Iterable
from typing import Protocol

from msgspec import Struct


class Reasoning(Struct, frozen=True):
    """What the model thinks before it answers, without the marks around it."""

    text: str


class Text(Struct, frozen=True):
    """Part of the answer's content."""

    text: str


class CallStart(Struct, frozen=True):
    """A tool call begins; `index` counts the calls of a sample from 0. The name is whole, the tool may not exist."""

    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """More of the arguments of call `index`, which are JSON once they are complete."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
    """Nothing more of call `index`: the only such event of a call.

    `complete`: its arguments are a whole JSON object; else the output was cut within the call, or it is malformed.
    """

    index: int
    complete: bool = True


Event = Reasoning | Text | CallStart | CallArguments | CallEnd


class OutputParser(Protocol):
    """Of one sample. Special tokens must be among the text that it is fed; it never raises, whatever the text is.

    The text of all events together does not depend on how the output is cut into pieces.
    """

    @property
    def markers(self) -> frozenset[int]:
        """Special tokens whose text it wants to see, each fed by itself, even where special tokens are not shown. Of
        others it then gets the id with an empty text.
        """
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Tokens fed so far that belong to the thinking, its end mark included."""
        ...

    @property
    def failures(self) -> int:
        """What began as a tool call and turned out to be malformed."""
        ...

    def feed(self, text: str, token_id: int | None) -> list[Event]:
        """`text` is what `token_id` added (it may be empty, or begin with text that was held back before).

        None: the text is of unknown tokens, so that markers in it are recognised by their letters.
        """
        ...

    def end(self) -> list[Event]:
        """Nothing more is coming: what was held back, and the ends of calls that were cut."""
        ...


def joined(events: Iterable[Event]) -> list[Event]:
    """The same in as few events as possible: neighbours of one kind are one."""
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
    """Give the last event all of its text."""
    if len(texts) < 2:
        return
    last, text = merged[-1], "".join(texts)
    if isinstance(last, CallArguments):
        merged[-1] = CallArguments(last.index, text)
    elif isinstance(last, Reasoning):
        merged[-1] = Reasoning(text)
    else:
        merged[-1] = Text(text)
