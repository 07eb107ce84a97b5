"""Mistral's formats, each after `[TOOL_CALLS]`.

Before tokenizer version 11 it is a list of objects with `name` and `arguments`. Later it is `N[ARGS]{...}` for each
call; some models write `[CALL_ID]` and an id before `[ARGS]`.
"""

import re
import secrets
import string
from collections.abc import Sequence

from roseinfer.core.guide import Trigger
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import CallCutOff, CallParser, MalformedCall, Mark, Schemas, Tool, literal, other_name
from roseinfer.text.tools.json_call import JsonCallParser, any_object_rules, object_rules
from roseinfer.text.tools.reader import Steps

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME = re.compile(r"[A-Za-z0-9_.-]+")
ID_CHARS = string.ascii_letters + string.digits
ID_CHAR_COUNT = 9


class Mistral:
    name = "mistral"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open, self._args, self._call_id = (Mark.of(text, tokenizer) for text in (OPEN, ARGS, CALL_ID))

    @classmethod
    def written_by(cls, template: str) -> bool:
        return OPEN in template

    @property
    def marks(self) -> tuple[Mark, ...]:
        return (self._open,)

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        return MistralParser((self._open,), inner=(self._args, self._call_id), new_id=new_call_id)

    def rules(self, tools: Sequence[Tool], most: int, schemas: Schemas) -> str:
        mark = self._open.lark
        if self._args.id is None:
            return f"tool_calls: {mark} call_list\n{_list_rule(most)}{object_rules(tools, schemas)}"
        lines = [f"tool_calls: tool_call{f' tool_call{{0,{most - 1}}}' if most > 1 else ''}\n"]
        lines.append(f"tool_call: {mark} ({' | '.join(f'tool_{i}' for i in range(len(tools)))})\n")
        return "".join(lines) + self._tool_rules(tools, schemas)

    def triggers(self, tools: Sequence[Tool], most: int, schemas: Schemas, others: bool = True) -> tuple[Trigger, ...]:
        if self._args.id is None:
            text = f"start: call_list\n{_list_rule(most)}{any_object_rules(tools, schemas, others=others)}"
            return (self._open.trigger(text),)
        strict = [tool for tool in tools if tool.strict or not others]
        choices = [*(f"tool_{i}" for i in range(len(strict))), *(["other"] if others else [])]
        text = (
            f"start: {' | '.join(choices)}\n"
            f"other: OTHER_NAME separator %json {schemas({'type': 'object'}, False)}\n"
            f"OTHER_NAME: {other_name([tool.name for tool in strict], '/[A-Za-z0-9_.-]{1,64}/')}\n"
        )
        return (self._open.trigger(text + self._tool_rules(strict, schemas)),)

    def _tool_rules(self, tools: Sequence[Tool], schemas: Schemas) -> str:
        with_id = "" if self._call_id.id is None else f"({self._call_id.lark} /[A-Za-z0-9]{{9}}/)? "
        lines = [f"separator: {with_id}{self._args.lark}\n"]
        for i, tool in enumerate(tools):
            lines.append(f"tool_{i}: {literal(tool.name)} separator %json {schemas(tool.schema, tool.strict)}\n")
        return "".join(lines)


def _list_rule(most: int) -> str:
    more = f' (", " call_object){{0,{most - 1}}}' if most > 1 else ""
    return f'call_list: / ?/ "[" call_object{more} "]"\n'


def new_call_id() -> str:
    """Return an id of the only form that Mistral's templates accept."""
    return "".join(secrets.choice(ID_CHARS) for _ in range(ID_CHAR_COUNT))


class MistralParser(JsonCallParser):
    def _call(self) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        char = yield from reader.peek()
        if char == "[":
            yield from self._list()
        elif char == "{":
            yield from self._object()
        else:
            yield from self._named()

    def _named(self) -> Steps[None]:
        reader = self.reader
        name = yield from reader.run(NAME)
        id: str | None = None
        word, taken = yield from reader.one_of((CALL_ID, ARGS))
        if word == CALL_ID:
            id = yield from reader.run(NAME)
            word, taken = yield from reader.one_of((ARGS,))
        if not (yield from reader.more()):
            raise CallCutOff
        if not name or (taken and word != ARGS) or (yield from reader.peek()) != "{":
            raise MalformedCall
        self.start(name, id if id is not None and _is_id(id) else None)
        yield from self.value(self.arguments, said=True)
        self.finish()


def _is_id(text: str) -> bool:
    return len(text) == ID_CHAR_COUNT and text.isascii() and text.isalnum()


FORMAT = Mistral
