"""Qwen3-Coder's and Qwen3.5's format: tags around the plain text of each parameter.

    <tool_call>
    <function=N>
    <parameter=K>
    V
    </parameter>
    </function>
    </tool_call>

The tool's schema gives the type of V.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from roseinfer.core.guide import Trigger
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import (
    CallCutOff,
    CallParser,
    MalformedCall,
    Mark,
    MarkedParser,
    Schemas,
    Tool,
    literal,
    next_char,
    other_name,
)
from roseinfer.text.tools.parameters import DEFINITIONS, Parameter, Parameters, refusal
from roseinfer.text.tools.python_value import quoted
from roseinfer.text.tools.reader import Steps
from roseinfer.text.tools.typed_text import as_json, only_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\r\n]+")
PLAIN = re.compile(r"[^<\n]+")
# A value and its end: text up to the first end mark.
VALUE = r"/(?s:.*)\n<\/parameter>\n/ & ~/(?s:.*<\/parameter>.*<\/parameter>.*)/"
BEHIND_NAME = literal(">\n")
# Keywords in a text's schema that need no enforcement; others cannot be enforced.
TEXT_KEYWORDS = frozenset({"type", "title", "description", "default", "examples", "enum", "const", "$comment"})


class QwenXml:
    name = "qwen_xml"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open, self._close = Mark.of(OPEN, tokenizer), Mark.of(CLOSE, tokenizer)

    @classmethod
    def written_by(cls, template: str) -> bool:
        return OPEN in template and FUNCTION in template and PARAMETER in template

    @property
    def marks(self) -> tuple[Mark, ...]:
        return (self._open, Mark(FUNCTION))

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        types = {tool.name: {p.name: p.types for p in Parameters.of(tool).all} for tool in tools}
        return QwenXmlParser(self.marks, types)

    def rules(self, tools: Sequence[Tool], most: int, schemas: Schemas) -> str:
        more = f' ("\\n" tool_call){{0,{most - 1}}}' if most > 1 else ""
        return (
            f"tool_calls: tool_call{more}\n"
            f'tool_call: {self._open.lark} "\\n" function {self._close.lark}\n'
            f"function: {' | '.join(f'tool_{i}' for i in range(len(tools)))}\n"
        ) + _tool_rules(tools, schemas)

    def triggers(self, tools: Sequence[Tool], most: int, schemas: Schemas, others: bool = True) -> tuple[Trigger, ...]:
        strict = [tool for tool in tools if tool.strict or not others]
        choices = [f"tool_{i}" for i in range(len(strict))]
        text = f"start: /\\n?/ function {self._close.lark}\n"
        if others:
            choices.append("other")
            name = other_name([tool.name for tool in strict], "/[^<>\\r\\n]{1,128}/")
            text += f"other: {literal(FUNCTION)} OTHER_NAME {BEHIND_NAME} any_parameter{{0,64}} END_FUNCTION\n"
            text += f"OTHER_NAME: {name}\n"
        text += f"function: {' | '.join(choices)}\n"
        return (self._open.trigger(text + _tool_rules(strict, schemas)),)


class QwenXmlParser(MarkedParser):
    def __init__(self, marks: Sequence[Mark], types: Mapping[str, Mapping[str, frozenset[str]]]) -> None:
        """`types`: tool, parameter and its possible JSON types; without types it is text."""
        self._types = types
        super().__init__(marks, (CLOSE,))

    def _call(self) -> Steps[None]:
        reader = self.reader
        if self._opened != FUNCTION:
            yield from reader.space()
            yield from self._one_of((FUNCTION,))
        name = yield from self._name()
        self.start(name)
        types, before = self._types.get(name, {}), "{"
        while True:
            reader.keep("")
            yield from reader.space()
            if (yield from self._one_of((PARAMETER, END_FUNCTION, CLOSE))) != PARAMETER:
                break
            key = yield from self._name()
            reader.forget()
            said = yield from self._value(f"{before}{quoted(key)}: ", types.get(key, frozenset()))
            before = ", " if said else before
        self.arguments("{}" if before == "{" else "}")
        self.finish()

    def _name(self) -> Steps[str]:
        """Take the name and the bracket after it."""
        reader = self.reader
        name = (yield from reader.run(NAME)).strip()
        if (yield from next_char(reader)) != ">" or not name:
            raise MalformedCall
        reader.take(1)
        return name

    def _one_of(self, words: tuple[str, ...]) -> Steps[str]:
        word, _ = yield from self.reader.one_of(words)
        if word:
            return word
        raise (MalformedCall if (yield from self.reader.more()) else CallCutOff)

    def _value(self, before: str, types: frozenset[str]) -> Steps[bool]:
        """Read a value. Return False for an empty value whose types exclude that; it is left out."""
        if only_text(types):
            self.arguments(f'{before}"')
            try:
                yield from self._text_up_to_end(self._say_text, self._text_alone)
            finally:
                self._flow = None
            self.arguments('"')
            return True
        pieces: list[str] = []
        yield from self._text_up_to_end(pieces.append)
        value = as_json("".join(pieces), types)
        if value is not None:
            self.arguments(before + value)
        return value is not None

    def _say_text(self, text: str) -> None:
        self.arguments(quoted(text)[1:-1])

    def _text_alone(self, text: str) -> str | None:
        """Return arguments for `_flow`."""
        return None if "<" in text or "\n" in text else quoted(text)[1:-1]

    def _text_up_to_end(
        self, sink: Callable[[str], object], flow: Callable[[str], str | None] | None = None
    ) -> Steps[None]:
        """Take all text before the end mark, without one line break at either end; then take the mark."""
        reader, held = self.reader, ""
        if (yield from reader.peek()) == "\n":
            reader.take(1)
        while char := (yield from reader.peek()):
            self._flow = None
            if char == "\n":
                sink(held)
                held = reader.take(1)
                continue
            word, taken = yield from reader.one_of((END_PARAMETER,))
            if word:
                return
            sink(held + taken)
            held = ""
            self._flow = flow
            yield from reader.run(PLAIN, sink)
        raise CallCutOff


# --- grammars -----------------------------------------------------------------------------------------------------
def _tool_rules(tools: Sequence[Tool], schemas: Schemas) -> str:
    lines = [
        f'END_FUNCTION: "{END_FUNCTION}\\n"\n',
        f"VALUE: {VALUE}\n",
        f"any_parameter: {literal(PARAMETER)} /[^<>\\r\\n]{{1,128}}/ {BEHIND_NAME} VALUE\n",
    ]
    for i, tool in enumerate(tools):
        Parameters.check(tool, QwenXml.name)
        lines += _tool_rule(i, tool, schemas)
    return "".join(lines)


def _tool_rule(index: int, tool: Tool, schemas: Schemas) -> list[str]:
    """Return rules for parameters in the order of the schema; optional ones may be omitted."""
    parameters = Parameters.of(tool)
    named = [parameter for parameter in parameters.all if _writable(tool, parameter)]
    parts = [f"parameter_{index}_{k}{'' if p.required else '?'}" for k, p in enumerate(named)]
    if not named and parameters.open:
        parts = ["any_parameter{0,64}"]
    lines = [f"tool_{index}: {literal(FUNCTION)} {literal(tool.name)} {BEHIND_NAME} {' '.join(parts)} END_FUNCTION\n"]
    for k, parameter in enumerate(named):
        opening = f"{literal(PARAMETER)} {literal(parameter.name)} {BEHIND_NAME}"
        lines.append(f"parameter_{index}_{k}: {opening} {_value_rule(tool, parameter, schemas)}\n")
    return lines


def _writable(tool: Tool, parameter: Parameter) -> bool:
    fits = NAME.fullmatch(parameter.name) is not None and parameter.name == parameter.name.strip()
    if tool.strict and not fits:
        raise refusal(tool, parameter.name, QwenXml.name)
    return fits


def _value_rule(tool: Tool, parameter: Parameter, schemas: Schemas) -> str:
    end = literal(f"\n{END_PARAMETER}\n")
    types = parameter.types
    if types and "string" not in types:
        return f"%json {schemas(parameter.schema, tool.strict)} {end}"
    words = parameter.schema.get("enum", [parameter.schema.get("const")])
    if isinstance(words, list) and words and all(isinstance(word, str) and "\n" not in word for word in words):
        return f"({' | '.join(map(literal, words))}) {end}"
    if tool.strict:
        _check_text(tool, parameter)
    return "VALUE"


def _check_text(tool: Tool, parameter: Parameter) -> None:
    """Refuse a strict tool whose parameter restricts its text."""
    keyword = next((key for key in parameter.schema if key not in TEXT_KEYWORDS | set(DEFINITIONS)), None)
    if keyword is None and not only_text(parameter.types):
        keyword = "type"
    if keyword is not None or "enum" in parameter.schema or "const" in parameter.schema:
        raise refusal(tool, keyword or "enum", QwenXml.name)


FORMAT = QwenXml
