"""What the formats of tool calls have in common: marks, tools, the text around calls, and what a call says."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from roseinfer.core.guide import Trigger
from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, OutputParser, Text
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.reader import Steps, TextReader

# Most calls of an answer that must call: models told to call tools may go on calling them without end.
MAX_CALLS = 16
# A JSON schema, and whether it must be kept to the letter -> the schema that a grammar's `%json` takes.
Schemas = Callable[[Mapping[str, Any], bool], str]


@dataclass(frozen=True, slots=True)
class Mark:
    """Text that opens or ends something; `id`: the token that it is, None if there is no such token."""

    text: str
    id: int | None = None

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> "Mark":
        return cls(text, added_token(tokenizer, text))

    @property
    def lark(self) -> str:
        """The mark in a Lark grammar."""
        return literal(self.text) if self.id is None else f"<[{self.id}]>"

    def trigger(self, grammar: str) -> Trigger:
        return Trigger(grammar=grammar, token_id=self.id, text=self.text if self.id is None else "")


def added_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a token that is written out as `text` and that text is always cut into, None if there is none."""
    id = tokenizer.backend.token_to_id(text)
    return id if id is not None and id in tokenizer.backend.get_added_tokens_decoder() else None


def literal(text: str) -> str:
    """Text in a Lark grammar."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return '"' + escaped.replace("\t", "\\t") + '"'


def other_name(taken: Sequence[str], any_name: str) -> str:
    """A terminal: `any_name` (a regular expression) but none of `taken`."""
    if not taken:
        return any_name
    return f"{any_name} & ~({' | '.join(map(literal, taken))})"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: a JSON schema, None if it takes no arguments.

    `strict`: a call of it must keep to the schema.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of its arguments, which are an object whatever `parameters` says."""
        if self.parameters:
            return self.parameters if "type" in self.parameters else {"type": "object", **self.parameters}
        return {"type": "object", "properties": {}, "additionalProperties": False}


class CallParser(OutputParser, Protocol):
    """Finds the calls in what a model says, thinking aside."""

    @property
    def within_call(self) -> bool:
        """Whether what came last is part of a call, or of what looks like one."""
        ...


class ToolFormat(Protocol):
    """One format of tool calls, for one tokenizer."""

    name: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer) -> None: ...

    @classmethod
    def written_by(cls, template: str) -> bool:
        """Whether a chat template has models write calls like this."""
        ...

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What opens a call: those that are tokens are never said if calls are not wanted."""
        ...

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        """`tools`: those of the request; formats without types of their own take them from the schemas."""
        ...

    def rules(self, tools: Sequence[Tool], most: int, schemas: Schemas) -> str:
        """Rules of a Lark grammar, with `tool_calls`: one to `most` calls of these tools."""
        ...

    def triggers(self, tools: Sequence[Tool], most: int, schemas: Schemas, others: bool = True) -> tuple[Trigger, ...]:
        """What opens a call within free text, and the grammar of the rest of it (`most`: of calls that follow it
        without being opened by a trigger of their own, too).

        The syntax of a call is enforced, name and schema only where a tool is strict: a name that is forced could be
        that of a wrong tool. `others` False: only `tools` may be called, each with arguments by its schema.
        """
        ...


def grammar(rules: str, after_thinking: bool = False, document: str = "") -> str:
    """The grammar of an answer that is calls and nothing else, from a format's `rules`.

    `after_thinking`: white space may stand before it. `document`: a schema, as `%json` takes it, of JSON that the
    answer may be instead.
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
    """What looked like a call is none, or the rest of a call is not what it must be. Never leaves a parser."""


class CallCutOff(Exception):
    """The output ended within a call. Never leaves a parser."""


def expect(reader: TextReader, chars: str) -> Steps[str]:
    """Take one of these characters. Raises `MalformedCall` at any other, `CallCutOff` at the end."""
    char = yield from reader.peek()
    if not char:
        raise CallCutOff
    if char not in chars:
        raise MalformedCall
    return reader.take(1)


class MarkedParser:
    """Text with calls in it, each behind one of `marks`: a `CallParser` but for what follows the mark, `_call`.

    White space before the first call and between calls is dropped if nothing else stands there.
    """

    # Whether what a mark opens is meant as a call for sure: then one that is malformed is a failure.
    _sure = True

    def __init__(
        self,
        marks: Sequence[Mark],
        closers: Sequence[str] = (),
        inner: Sequence[Mark] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`closers`: what may stand behind a call and says nothing. `inner`: marks within calls."""
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
        self._held = ""  # white space before the gap that begins
        self._index = -1
        self._open = False  # a call has been started and not ended
        self._opened = ""  # the mark of the last call
        self._calling = False  # a mark was taken, and what follows it is read
        self._plain = False  # nothing is held back, and only a mark is of interest
        # Set while what comes may be arguments that change nothing of what the parser waits for: what is said then of a
        # text, None if it has to be looked at.
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
        return self._taken()

    def _unmarked(self, text: str, token_id: int | None) -> bool:
        words = self._all if token_id is None else self._spelled
        return not any(word[0] in text for word in words)

    def _go_on(self) -> None:
        next(self._steps, None)

    def _taken(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    # --- what is said --------------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))

    def start(self, name: str, id: str | None = None) -> None:
        """A call begins; what was kept will not be given back."""
        self.reader.forget()
        self._index += 1
        self._open = True
        self._events.append(CallStart(self._index, id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._index, text))

    def finish(self, complete: bool = True) -> None:
        """The call ends, if one is open."""
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
        """Whether a call is the first thing said."""
        return (yield from self._gap())

    def _read_call(self) -> Steps[bool]:
        """Whether what follows a mark was a call; if not, it is text."""
        self._calling = True
        try:
            yield from self._call()
            self.reader.forget()
            return True
        except MalformedCall:
            self.failures += self._sure or self._open
            back = self.reader.kept()
        except CallCutOff:
            # Behind a call, what may still become another one is one that was cut before its name.
            back = self.reader.kept() if self._index < 0 else ""
        finally:
            self._calling = False
        self.finish(complete=False)
        self.say(back)
        return False

    def _call(self) -> Steps[None]:
        """The rest of a call, its mark has just been taken.

        Raise `MalformedCall` at the first character that does not fit, which is not taken, and `CallCutOff` at the end.
        """
        raise NotImplementedError

    def _text(self) -> Steps[bool]:
        """Text up to a mark, which is taken too; False: there is none."""
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
        """Where in the text at hand a mark may begin, its end if nowhere."""
        reader = self.reader
        words = self._all if reader.letters else self._spelled
        found = [reader.text.find(word[0], reader.at) for word in words] + [reader.mark]
        return min([at for at in found if at >= reader.at], default=len(reader.text))

    def _mark(self, closers: tuple[str, ...]) -> Steps[tuple[bool, str]]:
        """Whether a mark is next, which is then taken and kept; else a closer or what looked like either."""
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
        """White space before or between calls, and whether a call follows it; if text follows, it is part of that."""
        reader = self.reader
        closers = self._closers if self._index >= 0 else ()
        held, self._held = self._held, ""
        held += yield from reader.space()
        while (yield from reader.more()):
            opened, taken = yield from self._mark(closers)
            if opened:
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
        """What looked like a mark is text; not so where the output is cut within a mark behind a call."""
        words = self._all + self._closers
        likely = self._index >= 0 and taken and any(word.startswith(taken) for word in words)
        if not likely or (yield from self.reader.more()):
            self.say(space + taken)
