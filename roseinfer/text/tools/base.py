"""Common parts of the formats of tool calls: marks, tools, and the parser of text with calls."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from roseinfer.core.guide import Trigger
from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, OutputParser, Text
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.reader import Steps, TextReader

# Upper bound on calls in an answer that must call: models may otherwise continue without end.
MAX_CALLS = 16
# Function from a JSON schema and its strictness to the schema that a grammar's `%json` takes.
Schemas = Callable[[Mapping[str, Any], bool], str]


@dataclass(frozen=True, slots=True)
class Mark:
    """Text that opens or ends a part of the output. `id`: the token of this text, None if there is none."""

    text: str
    id: int | None = None

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> "Mark":
        return cls(text, added_token(tokenizer, text))

    @property
    def lark(self) -> str:
        """Terminal of the mark in a Lark grammar."""
        return literal(self.text) if self.id is None else f"<[{self.id}]>"

    def trigger(self, grammar: str) -> Trigger:
        return Trigger(grammar=grammar, token_id=self.id, text=self.text if self.id is None else "")


def added_token(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the added token `text`, which text always encodes to; None if there is none."""
    id = tokenizer.backend.token_to_id(text)
    return id if id is not None and id in tokenizer.backend.get_added_tokens_decoder() else None


def literal(text: str) -> str:
    """Return the text as a terminal of a Lark grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return '"' + escaped.replace("\t", "\\t") + '"'


def other_name(taken: Sequence[str], any_name: str) -> str:
    """Return a terminal that matches `any_name` (a regular expression) except the names in `taken`."""
    if not taken:
        return any_name
    return f"{any_name} & ~({' | '.join(map(literal, taken))})"


@dataclass(frozen=True, slots=True)
class Tool:
    """Function that the model may call.

    parameters: JSON schema, None if it takes no arguments. strict: calls must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """Schema of the arguments, which are always an object."""
        if self.parameters:
            return self.parameters if "type" in self.parameters else {"type": "object", **self.parameters}
        return {"type": "object", "properties": {}, "additionalProperties": False}


class CallParser(OutputParser, Protocol):
    """Parser of calls in the output without reasoning.

    only_calls: a grammar allows nothing but calls, so the opening of a call that is cut off is no text.
    """

    only_calls: bool

    @property
    def within_call(self) -> bool:
        """True if the latest text is part of a call, or of something that looks like one."""
        ...


class ToolFormat(Protocol):
    """Format of tool calls for one tokenizer."""

    name: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer) -> None: ...

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Return True if a chat template makes models write calls in this format."""
        ...

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Opening marks of calls. Those that are tokens are banned if calls are not wanted."""
        ...

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        """Return a parser. `tools`: the request's; formats without types of their own take them from the schemas."""
        ...

    def rules(self, tools: Sequence[Tool], most: int, schemas: Schemas) -> str:
        """Return rules of a Lark grammar with `tool_calls`: one to `most` calls of these tools."""
        ...

    def triggers(self, tools: Sequence[Tool], most: int, schemas: Schemas, others: bool = True) -> tuple[Trigger, ...]:
        """Return the openings of calls within free text, each with the grammar of the rest of the call.

        `most`: upper bound on calls that follow without another trigger, inclusive. The grammar enforces the syntax of
        a call, but name and schema only for strict tools, since a forced name could be that of a wrong tool. `others`
        False: only `tools` may be called, each with arguments that match its schema.
        """
        ...


def grammar(rules: str, after_thinking: bool = False, document: str = "") -> str:
    """Return the grammar of an answer that consists of calls, from a format's `rules`.

    after_thinking: allow white space before it. document: schema, as `%json` takes it, of JSON as an alternative
    answer.
    """
    lead = "LEAD? " if after_thinking else ""
    answer = "(tool_calls | document)" if document else "tool_calls"
    lines = [f"start: {lead}{answer}\n", rules]
    if after_thinking:
        lines.append("LEAD: /[ \\n]{1,8}/\n")
    if document:
        lines.append(f"document: %json {document}\n")
    return "".join(lines)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class MalformedCall(Exception):
    """Text is not a call after all, or the rest of a call is invalid. Never leaves a parser."""


class CallCutOff(Exception):
    """The output ended within a call. Never leaves a parser."""


def next_char(reader: TextReader) -> Steps[str]:
    """Return the next character, which is not taken. Raise `CallCutOff` at the end."""
    char = yield from reader.peek()
    if not char:
        raise CallCutOff
    return char


def expect(reader: TextReader, chars: str) -> Steps[str]:
    """Take one of `chars`. Raise `MalformedCall` at any other character, `CallCutOff` at the end."""
    if (yield from next_char(reader)) not in chars:
        raise MalformedCall
    return reader.take(1)


class MarkedParser:
    """Parser of text with calls, each after one of `marks`. Subclasses read the call itself in `_call`.

    White space before the first call and between calls is dropped if nothing else stands there.
    """

    only_calls = False
    # True if a mark always means a call, so that a malformed one is a failure.
    _sure = True

    def __init__(
        self,
        marks: Sequence[Mark],
        closers: Sequence[str] = (),
        inner: Sequence[Mark] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`closers`: text that may follow a call without meaning. `inner`: marks within calls."""
        self.failures = 0
        self.reader = TextReader()
        self._marks = tuple(marks)
        self._closers = tuple(closers)
        self._new_id = new_id
        self._by_id = {mark.id: mark for mark in marks if mark.id is not None}
        self._inner_ids = frozenset(mark.id for mark in inner if mark.id is not None)
        self._spelled = tuple(mark.text for mark in marks if mark.id is None)
        self._all = tuple(mark.text for mark in marks)
        self._events: list[Event] = []
        self._held = ""  # white space before the current gap
        self._index = -1
        self._open = False  # a call was started and not ended
        self._opened = ""  # the mark of the last call
        self._calling = False  # the text after a mark is being read
        self._plain = False  # nothing is withheld, and only a mark matters
        # Set while text may be plain arguments that do not change the parser's state. It returns the arguments for a
        # text, or None if the parser must read the text.
        self._flow: Callable[[str], str | None] | None = None
        self._steps = self._run()
        next(self._steps)

    # --- OutputParser, CallParser --------------------------------------------------------------------------------
    @property
    def markers(self) -> frozenset[int]:
        return self._inner_ids | self._by_id.keys()

    @property
    def within_call(self) -> bool:
        return self._calling

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def feed(self, text: str, token_id: int | None) -> list[Event]:
        if self._flow is not None:
            said = self._flow(text)
            if said is not None:
                return [CallArguments(self._index, said)] if said else []
        mark = None if token_id is None else self._by_id.get(token_id)
        if self._plain and mark is None and self._unmarked(text, token_id):
            return [Text(text)] if text else []
        seen = mark is not None and text.endswith(mark.text)
        at = len(text) - len(mark.text) if mark is not None and seen else -1
        self.reader.give(text, token_id is None or (mark is not None and not seen), at)
        self._go_on()
        return self._taken()

    def end(self) -> list[Event]:
        self.reader.give("", True)
        self.reader.ended = True
        self._go_on()
        if self.only_calls:
            return [event for event in self._taken() if not isinstance(event, Text)]
        return self._taken()

    def _unmarked(self, text: str, token_id: int | None) -> bool:
        words = self._all if token_id is None else self._spelled
        return not any(word[0] in text for word in words)

    def _go_on(self) -> None:
        next(self._steps, None)

    def _taken(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    # --- events --------------------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def start(self, name: str, id: str | None = None) -> None:
        """Begin a call. The text that was kept is not given back any more."""
        self.reader.forget()
        self._index += 1
        self._open = True
        self._events.append(CallStart(self._index, id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._index, text))

    def finish(self, complete: bool = True) -> None:
        """End the call, if one is open."""
        if self._open:
            self._open = False
            self._events.append(CallEnd(self._index, complete))

    # --- the text around calls -----------------------------------------------------------------------------------
    def _run(self) -> Steps[None]:
        opened = yield from self._begin()
        while opened or (yield from self._text()):
            whole = yield from self._read_call()
            opened = whole and (yield from self._gap())

    def _begin(self) -> Steps[bool]:
        """Return True if the output begins with a call."""
        return (yield from self._gap())

    def _read_call(self) -> Steps[bool]:
        """Read what follows a mark. Return True for a call; otherwise it is text."""
        self._calling = True
        try:
            yield from self._call()
            self.reader.forget()
            return True
        except MalformedCall:
            self.failures += self._sure or self._open
            back = self.reader.kept()
        except CallCutOff:
            # After a mark or a call, this is no text: it is a call that was cut off before its name.
            back = "" if self._opened or self._index >= 0 else self.reader.kept()
        finally:
            self._calling = False
        self.finish(complete=False)
        self.say(back)
        return False

    def _call(self) -> Steps[None]:
        """Read the rest of a call after its mark.

        Raise `MalformedCall` at the first character that does not fit, which is not taken, and `CallCutOff` at the end.
        """
        raise NotImplementedError

    def _text(self) -> Steps[bool]:
        """Read text up to a mark, which is taken too. Return False if there is none."""
        reader = self.reader
        while True:
            self._plain = True
            if not (yield from reader.more()):
                return False
            self._plain = False
            at = self._next_mark()
            self.say(reader.take(at - reader.at))
            if at < len(reader.text):
                opened, taken = yield from self._mark(())
                if opened:
                    return True
                self.say(taken)

    def _next_mark(self) -> int:
        """Return where a mark may begin in the available text; its end if nowhere."""
        reader = self.reader
        words = self._all if reader.letters else self._spelled
        found = [reader.text.find(word[0], reader.at) for word in words] + [reader.mark]
        return min([at for at in found if at >= reader.at], default=len(reader.text))

    def _mark(self, closers: tuple[str, ...]) -> Steps[tuple[bool, str]]:
        """Take a mark, a closer, or an unfinished one. Return whether it is a mark, which is kept, and other text
        taken.
        """
        reader = self.reader
        if reader.mark == reader.at:
            reader.keep("")
            self._opened = reader.rest()
            return True, ""
        spelled = self._all if reader.letters else self._spelled
        word, taken = yield from reader.one_of(spelled + closers)
        if word and word in spelled:
            reader.keep(word)
            self._opened = word
            return True, ""
        return False, taken

    def _gap(self) -> Steps[bool]:
        """Read white space before or between calls. Return True if a call follows; otherwise the space is part of the
        text.
        """
        reader = self.reader
        closers = self._closers if self._index >= 0 else ()
        held, self._held = self._held, ""
        held += yield from reader.space()
        while (yield from reader.more()):
            opened, taken = yield from self._mark(closers)
            if opened:
                reader.keep(held + reader.kept())  # all of it is text if no call follows
                return True
            if not taken or taken not in closers:
                yield from self._not_a_mark(held, taken)
                return False
            closers = ()
            held = yield from reader.space()
        if self._index < 0:
            self.say(held)
        return False

    def _not_a_mark(self, space: str, taken: str) -> Steps[None]:
        """Emit a supposed mark as text, unless the output ended within a mark after a call."""
        words = self._all + self._closers
        likely = self._index >= 0 and taken and any(word.startswith(taken) for word in words)
        if not likely or (yield from self.reader.more()):
            self.say(space + taken)
