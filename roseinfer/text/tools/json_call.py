"""Calls as JSON objects: `{"name": N, "arguments": {...}}`, in any order, perhaps with other members."""

import json
from collections.abc import Callable, Sequence

from roseinfer.text.tools.base import (
    CallCutOff,
    MalformedCall,
    MarkedParser,
    Schemas,
    Tool,
    expect,
    literal,
    next_char,
    other_name,
)
from roseinfer.text.tools.json_value import JsonValue
from roseinfer.text.tools.reader import Steps

ARGUMENTS = ("arguments", "parameters")
NULL = "null"


class JsonCallParser(MarkedParser):
    """Parser of such objects. `_sure`: the preceding text shows that an object is a call.

    Otherwise the object must have both members, and only members of `LIKELY` before them, so that other JSON is soon
    sent as text.
    """

    LIKELY = frozenset({"name", "type", "id", *ARGUMENTS})

    def _object(self) -> Steps[None]:
        """Read from the opening bracket on. Raise as `_call`."""
        call = _Call(self, self._sure)
        try:
            yield from self._members(call)
        except MalformedCall:
            # The arguments may be complete if only the end of the object is missing.
            if not call.whole:
                raise
        except CallCutOff:
            call.start_if_named()
            if not call.whole:
                raise
        call.end()

    def _list(self) -> Steps[None]:
        """Read a list of such objects from its opening bracket on."""
        reader = self.reader
        yield from expect(self.reader, "[")
        while True:
            yield from reader.space()
            yield from self._object()
            reader.keep("")
            yield from reader.space()
            if (yield from expect(self.reader, ",]")) == "]":
                return

    def _members(self, call: "_Call") -> Steps[None]:
        reader = self.reader
        yield from expect(self.reader, "{")
        yield from reader.space()
        if (yield from reader.peek()) == "}":
            reader.take(1)
            return
        while True:
            yield from self._member(call)
            yield from reader.space()
            if (yield from expect(self.reader, "},")) == "}":
                return
            yield from reader.space()

    def _member(self, call: "_Call") -> Steps[None]:
        reader = self.reader
        name = yield from self._string()
        if not self._sure and not call.started and name not in self.LIKELY:
            raise MalformedCall
        yield from reader.space()
        yield from expect(self.reader, ":")
        yield from reader.space()
        if name == "name":
            call.named((yield from self._string()))
        elif name in ARGUMENTS and not call.whole:
            yield from self._arguments(call)
        else:
            yield from self.value(_ignore)

    def _arguments(self, call: "_Call") -> Steps[None]:
        """Read arguments: an object, null for none, or an object that the model quoted as a string."""
        first = yield from self.reader.peek()
        if first == "{":
            call.opened()
            yield from self.value(call.more, said=call.started)
        else:
            if call.started:
                self.reader.keep("")
            text = (yield from self._string()) if first == '"' else (yield from self._raw())
            arguments = _quoted_arguments(text, first == '"')
            if call.started:
                self.reader.forget()
            call.opened()
            call.more(arguments)
        call.whole = True

    def _string(self) -> Steps[str]:
        if (yield from next_char(self.reader)) != '"':
            raise MalformedCall
        raw = yield from self._raw()
        try:
            text = str(json.loads(raw, strict=False))
            text.encode()
        except ValueError as error:  # an invalid escape, or half of a surrogate pair
            raise MalformedCall from error
        return text

    def _raw(self) -> Steps[str]:
        pieces: list[str] = []
        yield from self.value(pieces.append)
        return "".join(pieces)

    # --- for other formats, too ------------------------------------------------------------------------------------
    def value(self, sink: Callable[[str], object], said: bool = False) -> Steps[None]:
        """Read a JSON value; `sink` gets it as it arrives. `said`: emit it at once as arguments of the open call."""
        value = JsonValue()
        try:
            self._flow = value.within_string if said else None
            yield from self._rest_of(value, sink)
        finally:
            self._flow = None

    def _rest_of(self, value: JsonValue, sink: Callable[[str], object]) -> Steps[None]:
        reader = self.reader
        while not value.done and (yield from reader.more()):
            end = value.feed(reader.text, reader.at)
            if end > reader.at:
                sink(reader.take(end - reader.at))
            if value.failed:
                raise MalformedCall
        if not value.done:
            value.end()
            if not value.done:
                raise CallCutOff


class _Call:
    """State of a call that is being read.

    The call starts with its name. If it is not `sure` to be a call, it starts with name and arguments; arguments that
    come before wait.
    """

    def __init__(self, parser: JsonCallParser, sure: bool) -> None:
        self.started = False
        self.whole = False  # the arguments are complete
        self._parser = parser
        self._sure = sure
        self._name: str | None = None
        self._waiting: list[str] = []
        self._has_arguments = False

    def named(self, name: str) -> None:
        if self._name is not None or not name:
            raise MalformedCall
        self._name = name
        if self._has_arguments or self._sure:
            self._start()

    def opened(self) -> None:
        self._has_arguments = True
        self.start_if_named()

    def more(self, text: str) -> None:
        if self.started:
            self._parser.arguments(text)
        else:
            self._waiting.append(text)

    def start_if_named(self) -> None:
        """Start the call unless its name is still to come."""
        if self._name is not None and not self.started:
            self._start()

    def end(self) -> None:
        """End the object. Without arguments it is a call only if that is sure."""
        if not self.started:
            raise MalformedCall
        if not self._has_arguments:
            self._parser.arguments("{}")
        self._parser.finish()

    def _start(self) -> None:
        assert self._name is not None
        self.started = True
        self._parser.start(self._name)
        self._parser.arguments("".join(self._waiting))


def _quoted_arguments(text: str, quoted: bool) -> str:
    """Return arguments from the JSON string `text` or the word null. Raise `MalformedCall` for anything else."""
    if not quoted:
        if text == NULL:
            return "{}"
        raise MalformedCall
    value = JsonValue()
    if not text.startswith("{") or value.feed(text, 0) != len(text) or not value.done:
        raise MalformedCall
    return text


def _ignore(text: str) -> None:
    pass


# --- grammars -----------------------------------------------------------------------------------------------------
def object_rules(tools: Sequence[Tool], schemas: Schemas) -> str:
    """Return rule `call_object`: a call of one of `tools`, with arguments that match its schema."""
    lines = [f"call_object: {' | '.join(f'tool_{i}' for i in range(len(tools)))}\n"]
    lines += [_tool_rule(i, tool, schemas) for i, tool in enumerate(tools)]
    return "".join(lines)


def any_object_rules(tools: Sequence[Tool], schemas: Schemas, arguments: str = "arguments", others: bool = True) -> str:
    """Return rule `call_object`: a call of any name; calls of strict tools must match their schema.

    `others` False: only one of `tools`. All alternatives use the same terminals, since the longest terminal wins.
    """
    held = [tool for tool in tools if tool.strict or not others]
    key = f'"{{" WS {literal(json.dumps("name"))} WS ":" WS'
    between = f'WS "," WS {literal(json.dumps(arguments))} WS ":" WS'
    calls = [
        f'{key} {literal(json.dumps(tool.name))} {between} %json {schemas(tool.schema, tool.strict)} WS "}}"'
        for tool in held
    ]
    lines = [f"WS: {WHITE_SPACE}\n"]
    if others:
        calls.append(f'{key} OTHER_NAME {between} any_arguments WS "}}"')
        name, comma = literal(json.dumps("name")), 'WS "," WS'
        opening = f'"{{" WS {literal(json.dumps(arguments))} WS ":" WS any_arguments {comma}'
        calls.append(f'{opening} {name} WS ":" WS OTHER_NAME WS "}}"')
        lines.append(f"any_arguments: %json {schemas({'type': 'object'}, False)}\n")
        lines.append(f"OTHER_NAME: {other_name([json.dumps(tool.name) for tool in held], QUOTED_NAME)}\n")
    return f"call_object: {' | '.join(calls)}\n" + "".join(lines)


WHITE_SPACE = "/[ \\n]{0,4}/"
QUOTED_NAME = r'/"[^"\\\x00-\x1f\x7f]{1,128}"/'


def _tool_rule(index: int, tool: Tool, schemas: Schemas) -> str:
    opening = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f'tool_{index}: {opening} %json {schemas(tool.schema, tool.strict)} "}}"\n'
