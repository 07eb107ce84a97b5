"""Streaming parser of harmony by token ids. Malformed output never makes it raise.

Channel `analysis` is reasoning. A message to `functions.NAME` is a tool call. All other messages are text, those of
unknown channels too. A header that has not ended has no content, so its text is dropped.
"""

from collections.abc import Collection
from enum import Enum, auto

from roseinfer.text.harmony.tokens import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    FUNCTIONS,
    HarmonyTokens,
    Header,
)
from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, Reasoning, Text, TextBreak
from roseinfer.text.tools.base import new_call_id
from roseinfer.text.tools.json_value import JsonValue


class MessagePart(Enum):
    """Part of a message that the next token belongs to."""

    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyParser:
    """Parser of one output; see `OutputParser`.

    `begun`: text of the header that the prompt leaves open. `opened`: that header has ended, so content comes first.
    `tools`: names of the tools, None if nothing is a call. `reasoning` False: reasoning is text.
    """

    def __init__(
        self,
        tokens: HarmonyTokens,
        begun: str = "",
        opened: bool = False,
        tools: Collection[str] | None = None,
        reasoning: bool = True,
    ) -> None:
        self.failures = 0
        self.reasoning_tokens = 0
        self._tokens = tokens
        self._tools, self._reasoning = tools, reasoning
        self._marks = frozenset(
            {tokens.start, tokens.channel, tokens.message, tokens.constrain, tokens.end, tokens.ret, tokens.call}
        )
        self._ends = frozenset(tokens.ends)
        self._part = MessagePart.HEADER
        self._header = [begun]
        self._header_tokens = 0
        self._calls = 0
        self._arguments = _Arguments()
        self._break: Event | None = None  # comes before the next text, as an earlier message was of the same kind
        self._said: set[MessagePart] = set()  # kinds of the messages with text
        self._events: list[Event] = []
        if opened:
            self._open()

    @property
    def markers(self) -> frozenset[int]:
        return self._marks

    def feed(self, text: str, token_id: int | None) -> list[Event]:
        if token_id is None or token_id not in self._marks:
            self._take(text, token_id is not None)
        else:
            self._mark(token_id)
        events, self._events = self._events, []
        return events

    def end(self) -> list[Event]:
        if self._part is MessagePart.CALL:
            self.failures += self._arguments.malformed
            self._events.append(CallEnd(self._calls - 1, self._arguments.complete))
        self._begin()
        events, self._events = self._events, []
        return events

    # --- tokens ---------------------------------------------------------------------------------------------------
    def _take(self, text: str, counts: bool) -> None:
        """Take text that is no mark. `counts`: it is a token."""
        if self._part is MessagePart.HEADER:
            self._header_tokens += counts
            self._header.append(text)
        elif self._part is MessagePart.CALL:
            self._say_arguments(text)
        else:
            self.reasoning_tokens += counts and self._part is MessagePart.REASONING
            self._say(text)

    def _mark(self, token: int) -> None:
        tokens, in_header = self._tokens, self._part is MessagePart.HEADER
        if token in self._ends or token == tokens.start:
            self.reasoning_tokens += self._part is MessagePart.REASONING and token in self._ends
            self._close()
        elif token == tokens.channel:
            if not in_header:
                self._close()
            self._header.append(CHANNEL)
        elif not in_header:
            # Within a content these have no meaning.
            self.reasoning_tokens += self._part is MessagePart.REASONING
            return
        elif token == tokens.message:
            self._header_tokens += 1
            self._open()
            return
        else:
            self._header.append(" ")
        self._header_tokens += token not in self._ends

    def _open(self) -> None:
        """Begin the content of a message."""
        header = Header.read("".join(self._header))
        name = self._called(header)
        if name is not None:
            self._part = MessagePart.CALL
            self._arguments = _Arguments()
            self._events.append(CallStart(self._calls, new_call_id(), name))
            self._calls += 1
            return
        reasons = self._reasoning and header.channel == ANALYSIS
        self._part = MessagePart.REASONING if reasons else MessagePart.TEXT
        self.reasoning_tokens += self._header_tokens if reasons else 0
        if self._part in self._said:
            self._break = Reasoning("\n\n") if reasons else TextBreak()
        else:
            self._break = None

    def _called(self, header: Header) -> str | None:
        """Return the name of the tool that a message calls. Unknown names are passed on."""
        to = header.recipient
        if self._tools is None or not to:
            return None
        if to.startswith(FUNCTIONS):
            return to.removeprefix(FUNCTIONS) or None
        return to if to in self._tools or header.channel == COMMENTARY else None

    def _close(self) -> None:
        """End a message, if its content has begun."""
        if self._part is MessagePart.CALL:
            if self._arguments.empty:
                self._say_arguments("{}")
            self.failures += not self._arguments.complete
            self._events.append(CallEnd(self._calls - 1, self._arguments.complete))
        self._begin()

    def _begin(self) -> None:
        self._part, self._header, self._header_tokens = MessagePart.HEADER, [], 0

    # --- events ---------------------------------------------------------------------------------------------------
    def _say(self, text: str) -> None:
        if not text:
            return
        if self._break is not None:
            self._events.append(self._break)
            self._break = None
        self._said.add(self._part)
        self._events.append(Reasoning(text) if self._part is MessagePart.REASONING else Text(text))

    def _say_arguments(self, text: str) -> None:
        shown = self._arguments.take(text)
        if shown:
            self._events.append(CallArguments(self._calls - 1, shown))


class _Arguments:
    """Arguments of a call as they arrive: JSON, without white space around it. Other text is passed on unchanged."""

    def __init__(self) -> None:
        self.empty = True
        self._is_object = False
        self._value = JsonValue()
        self._after = ""  # white space after the value
        self._broken = False

    @property
    def malformed(self) -> bool:
        """True if no further text could complete them."""
        return self._broken or not (self.empty or self._is_object)

    @property
    def complete(self) -> bool:
        return self._value.done and self._is_object and not self._broken

    def take(self, text: str) -> str:
        """Read more text. Return what is to be sent of it."""
        if self.empty:
            text = text.lstrip()
            if not text:
                return ""
            self.empty, self._is_object = False, text.startswith("{")
        if self._broken:
            return text
        end = 0 if self._value.done else self._value.feed(text, 0)
        self._broken = self._value.failed
        if not self._value.done:
            return text
        self._after += text[end:]
        if not self._after.strip():
            return text[:end]
        self._broken = True
        return text[:end] + self._after
