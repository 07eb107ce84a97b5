"""Round trips of arguments: a parser reads back any call that is written in its format."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.text.tools.base import Tool
from roseinfer.text.tools.registry import tool_format
from tests.helpers.cases import cases, examples
from tests.text.tools.recorded import ORDINARY, fed, plain_tokenizer

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


def types(value: Any) -> list[str]:
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return [kinds.get(type(value), "object")]


def written(name: str, arguments: dict[str, Any]) -> str:
    as_json = json.dumps(arguments, ensure_ascii=False)
    if name == "hermes":
        return f'<tool_call>\n{{"name": "f", "arguments": {as_json}}}\n</tool_call>'
    if name == "llama_json":
        return f'{{"name": "f", "parameters": {as_json}}}'
    if name == "mistral":
        return f'[TOOL_CALLS][{{"name": "f", "arguments": {as_json}}}]'
    if name == "pythonic":
        return f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parts = (f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>"


@cases("name", ["hermes", "pythonic", "qwen_xml"], exhaustive=["llama_json", "mistral"])
@examples(60)
@given(arguments=ARGUMENTS)
def test_arguments_come_back(name: str, arguments: dict[str, Any]):
    properties = {key: {"type": types(value)} for key, value in arguments.items()}
    tools = [Tool("f", {"type": "object", "properties": properties})]
    parser = tool_format(name, plain_tokenizer()).parser(tools)
    ((kind, called, read, complete),) = fed(parser, [(char, ORDINARY) for char in written(name, arguments)])
    assert (kind, called, complete) == ("call", "f", True)
    assert json.loads(read) == arguments
    if name in ("hermes", "llama_json", "mistral"):
        assert read == json.dumps(arguments, ensure_ascii=False), "in the model's own characters"
