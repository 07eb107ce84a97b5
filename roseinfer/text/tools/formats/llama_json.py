"""Llama 3.1's and 3.2's format: the answer is `{"name": N, "parameters": {...}}`, perhaps after `<|python_tag|>`.

The models also write several, joined by `;`, or a list of them.
"""

import json
from collections.abc import Sequence

from roseinfer.core.guide import Trigger
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import CallParser, Mark, Schemas, Tool, literal, other_name
from roseinfer.text.tools.json_call import WHITE_SPACE, JsonCallParser, any_object_rules
from roseinfer.text.tools.reader import Steps

TAG = "<|python_tag|>"
ARGUMENTS = "parameters"
# Beginning of a call; an answer in free text may also be other JSON.
OPENING = '{"name": "'
QUOTE = '"'
NAME_REST = r'/[^"\\\x00-\x1f\x7f]{1,128}"/'


class LlamaJson:
    name = "llama_json"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tag = Mark.of(TAG, tokenizer)

    @classmethod
    def written_by(cls, template: str) -> bool:
        return '"parameters":' in template.replace("\\", "") and "dictionary of argument name" in template

    @property
    def marks(self) -> tuple[Mark, ...]:
        return (self._tag,)

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        return LlamaJsonParser((self._tag,))

    def rules(self, tools: Sequence[Tool], most: int, schemas: Schemas) -> str:
        """Return rules for one call, since the models were trained for no more; `most` is ignored."""
        return "tool_calls: call_object\n" + any_object_rules(tools, schemas, ARGUMENTS, others=False)

    def triggers(self, tools: Sequence[Tool], most: int, schemas: Schemas, others: bool = True) -> tuple[Trigger, ...]:
        tagged = "start: WS call_object\n" + any_object_rules(tools, schemas, ARGUMENTS, others)
        return (
            self._tag.trigger(tagged),
            Trigger(grammar=_rest_of_object(tools, schemas, others), text=OPENING, at_start=True),
        )


class LlamaJsonParser(JsonCallParser):
    _sure = False

    def _begin(self) -> Steps[bool]:
        reader = self.reader
        self._held = yield from reader.space()
        char = yield from reader.peek()
        if char and char in "{[" and reader.at != reader.mark:
            reader.keep(self._held)
            return True
        return (yield from self._gap())

    def _call(self) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.peek()) == "[":
            yield from self._list()
            return
        while True:
            yield from self._object()
            reader.keep("")
            yield from reader.space()
            if (yield from reader.peek()) != ";":
                self._held = reader.kept()
                return
            reader.take(1)
            yield from reader.space()


def _rest_of_object(tools: Sequence[Tool], schemas: Schemas, others: bool) -> str:
    """Return the grammar after `OPENING`: of any object, but a strict tool's call must have its arguments.

    `others` False: only calls of `tools`.
    """
    held = [tool for tool in tools if tool.strict or not others]
    between = f'WS "," WS {literal(json.dumps(ARGUMENTS))} WS ":" WS'
    choices = [
        f"{literal(tool.name + QUOTE)} {between} %json {schemas(tool.schema, tool.strict)} WS {literal('}')}"
        for tool in held
    ]
    lines = [f"WS: {WHITE_SPACE}\n"]
    if others:
        taken = [tool.name + QUOTE for tool in held]
        choices.append('OTHER_NAME (WS "," WS any_text WS ":" WS anything)* WS "}"')
        lines.append(f"any_text: %json {schemas({'type': 'string'}, False)}\n")
        lines.append(f"anything: %json {schemas({}, False)}\n")
        lines.append(f"OTHER_NAME: {other_name(taken, NAME_REST)}\n")
    return f"start: {' | '.join(choices)}\n" + "".join(lines)


FORMAT = LlamaJson
