"""Hermes' format, also of Qwen2.5 and Qwen3: `<tool_call>\\n{"name": N, "arguments": {...}}\\n</tool_call>`."""

from collections.abc import Sequence

from roseinfer.core.guide import Trigger
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import CallParser, Mark, Schemas, Tool
from roseinfer.text.tools.json_call import JsonCallParser, any_object_rules, object_rules
from roseinfer.text.tools.reader import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    name = "hermes"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open, self._close = Mark.of(OPEN, tokenizer), Mark.of(CLOSE, tokenizer)

    @classmethod
    def written_by(cls, template: str) -> bool:
        plain = template.replace("\\", "")
        return OPEN in plain and '{"name"' in plain.replace('{"arguments"', '{"name"') and "<function=" not in plain

    @property
    def marks(self) -> tuple[Mark, ...]:
        return (self._open,)

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        return HermesParser((self._open,), (CLOSE,))

    def rules(self, tools: Sequence[Tool], most: int, schemas: Schemas) -> str:
        more = f' ("\\n" tool_call){{0,{most - 1}}}' if most > 1 else ""
        return (
            f'tool_calls: tool_call{more}\ntool_call: {self._open.lark} "\\n" call_object "\\n" {self._close.lark}\n'
        ) + object_rules(tools, schemas)

    def triggers(self, tools: Sequence[Tool], most: int, schemas: Schemas, others: bool = True) -> tuple[Trigger, ...]:
        start = f"start: LINE call_object LINE {self._close.lark}\nLINE: /\\n?/\n"
        return (self._open.trigger(start + any_object_rules(tools, schemas, others=others)),)


class HermesParser(JsonCallParser):
    def _call(self) -> Steps[None]:
        yield from self.reader.space()
        yield from self._object()


FORMAT = Hermes
