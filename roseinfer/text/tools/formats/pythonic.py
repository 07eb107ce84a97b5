"""Calls in Python's notation, of Llama 4 and others: the answer is a list, `[f(a=1, b='x'), g()]`."""

import re
from collections.abc import Sequence

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
    expect,
    literal,
    other_name,
)
from roseinfer.text.tools.parameters import Parameter, Parameters, refusal
from roseinfer.text.tools.python_value import VALUE_RULES, PythonValue, quoted
from roseinfer.text.tools.reader import Steps

BEGIN, END = "<|python_start|>", "<|python_end|>"
# Models copy dots and dashes from the names in the prompt.
NAME = re.compile(r"[\w.-]+")
ANY_NAME = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
# Any arguments, and the closing bracket.
ANY_REST = (
    'any_rest: (any_argument next_argument{0,63})? PYTHON_SPACE ")"\n'
    'next_argument: PYTHON_SPACE "," PYTHON_SPACE any_argument\n'
    'any_argument: ANY_NAME PYTHON_SPACE "=" PYTHON_SPACE python_value\n'
    f"ANY_NAME: {ANY_NAME}\n{VALUE_RULES}"
)


class Pythonic:
    name = "pythonic"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._begin = Mark.of(BEGIN, tokenizer)

    @classmethod
    def written_by(cls, template: str) -> bool:
        return "func_name1(" in template

    @property
    def marks(self) -> tuple[Mark, ...]:
        return (self._begin,)

    def parser(self, tools: Sequence[Tool] = ()) -> CallParser:
        return PythonicParser((self._begin,), (END,))

    def rules(self, tools: Sequence[Tool], most: int, schemas: Schemas) -> str:
        calls = " | ".join(f"{literal(tool.name + '(')} rest_{i}" for i, tool in enumerate(tools))
        more = f' (", " call){{0,{most - 1}}}' if most > 1 else ""
        return f'tool_calls: "[" call{more} "]"\ncall: {calls}\n' + self._rests(tools, schemas)

    def triggers(self, tools: Sequence[Tool], most: int, schemas: Schemas, others: bool = True) -> tuple[Trigger, ...]:
        """Return triggers after the name of a tool, since other lists are no calls."""
        held = [tool for tool in tools if tool.strict or not others]
        rests = [f"rest_{held.index(tool)}" if tool in held else "any_rest" for tool in tools]
        calls = [f"{literal(f'{tool.name}(')} rest_{i}" for i, tool in enumerate(held)]
        rules = self._rests(held, schemas)
        if others:
            calls.append('OTHER_NAME "(" any_rest')
            rules += f"OTHER_NAME: {other_name([tool.name for tool in held], ANY_NAME)}\n"
        rules += f"call: {' | '.join(calls)}\n"
        more = f' (PYTHON_SPACE "," PYTHON_SPACE call){{0,{most - 1}}}' if most > 1 else ""
        end = f'{more} PYTHON_SPACE "]"\n{rules}'
        triggers = [
            Trigger(grammar=f"start: {rest}{end}", text=f"[{tool.name}(", at_start=True)
            for tool, rest in zip(tools, rests, strict=True)
        ]
        if self._begin.id is not None:
            triggers.append(self._begin.trigger(f'start: PYTHON_SPACE "[" call{end}'))
        return tuple(triggers)

    def _rests(self, tools: Sequence[Tool], schemas: Schemas) -> str:
        """Return rules `rest_i`: tool i's arguments and the closing bracket."""
        for tool in tools:
            _check(tool)
        return "".join(_rest_rules(i, tool, schemas) for i, tool in enumerate(tools)) + ANY_REST


class PythonicParser(MarkedParser):
    _sure = False

    def _begin(self) -> Steps[bool]:
        reader = self.reader
        self._held = yield from reader.space()
        if (yield from reader.peek()) == "[" and reader.at != reader.mark:
            reader.keep(self._held)
            return True
        return (yield from self._gap())

    def _call(self) -> Steps[None]:
        """Read consecutive lists, which some models write for dependent calls."""
        reader = self.reader
        while True:
            yield from self._list()
            reader.keep("")
            yield from reader.space()
            if (yield from reader.peek()) != "[":
                self._held = reader.kept()
                return

    def _list(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self.reader.space()
            yield from self._one()
            self.reader.keep("")
            if (yield from self._expect(",]")) == "]":
                return

    def _one(self) -> Steps[None]:
        name = yield from self._name()
        yield from self._expect("(")
        yield from self.reader.space()
        if (yield from self.reader.peek()) == ")":
            self.reader.take(1)
            self.start(name)
            self.arguments("{}")
        else:
            yield from self._arguments(name)
        self.finish()

    def _arguments(self, name: str) -> Steps[None]:
        """Read from the first argument to the closing bracket."""
        reader, before, more = self.reader, "{", True
        while more:
            key = yield from self._name()
            yield from self._expect("=")
            if before == "{":
                self.start(name)
                reader.keep(f"{key}=")
            yield from reader.space()
            more = yield from self._value(f"{before}{quoted(key)}: ")
            # This part is emitted; what follows may have to be given back.
            reader.keep("")
            before = ", "
            yield from reader.space()
            if more and (yield from reader.peek()) == ")":
                reader.take(1)
                more = False
        self.arguments("}")

    def _value(self, before: str) -> Steps[bool]:
        """Emit a complete value. Return True if a comma follows, not a closing bracket."""
        value = PythonValue(self.reader)
        try:
            yield from value.read()
            end = yield from self._expect(",)")
        except CallCutOff:
            self.reader.forget()
            self.arguments(before + value.json)
            raise
        self.arguments(before + value.json)
        return end == ","

    def _name(self) -> Steps[str]:
        name = yield from self.reader.run(NAME)
        if not (yield from self.reader.more()):
            raise CallCutOff
        if not name or name[0].isdecimal():
            raise MalformedCall
        return name

    def _expect(self, chars: str) -> Steps[str]:
        """Take one of these characters, perhaps after white space, or raise."""
        yield from self.reader.space()
        return (yield from expect(self.reader, chars))


# --- grammars -----------------------------------------------------------------------------------------------------
def _check(tool: Tool) -> None:
    Parameters.check(tool, Pythonic.name)
    for parameter in Parameters.of(tool).all:
        if tool.strict and not NAME.fullmatch(parameter.name):
            raise refusal(tool, parameter.name, Pythonic.name)


def _rest_rules(index: int, tool: Tool, schemas: Schemas) -> str:
    """Return rules for arguments by name in the order of the schema, with JSON values; optional ones may be omitted.

    Rule `first_I_K`: parameters from K on, none written so far; `more_I_K`: some were written.
    """
    parameters = Parameters.of(tool)
    named = [parameter for parameter in parameters.all if NAME.fullmatch(parameter.name)]
    if not named and parameters.open:
        return f"rest_{index}: any_rest\n"
    lines = [f"rest_{index}: first_{index}_0\n"]
    for place, parameter in enumerate(named):
        lines += _parameter_rules(f"{index}_{place}", f"{index}_{place + 1}", parameter, tool.strict, schemas)
    end = f"{index}_{len(named)}"
    return "".join([*lines, f'first_{end}: ")"\n', f'more_{end}: ")"\n'])


def _parameter_rules(here: str, after: str, parameter: Parameter, strict: bool, schemas: Schemas) -> list[str]:
    skip = ["", ""] if parameter.required else [f" | first_{after}", f" | more_{after}"]
    return [
        f"first_{here}: argument_{here} more_{after}{skip[0]}\n",
        f'more_{here}: ", " argument_{here} more_{after}{skip[1]}\n',
        f"argument_{here}: {literal(parameter.name + '=')} %json {schemas(parameter.schema, strict)}\n",
    ]


FORMAT = Pythonic
