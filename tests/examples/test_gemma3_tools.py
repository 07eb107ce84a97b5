"""examples/gemma3_tools.jinja: the prompt of a chat with tools, and calls that the parser of their format reads."""

import json
from pathlib import Path
from typing import Any

from roseinfer.text.chat import ChatTemplate
from roseinfer.text.output import CallArguments, CallStart
from roseinfer.text.tools.registry import detect, tool_format
from tests.text.tokenizers import byte_level

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "clock")]


def test_the_template_for_gemma_3() -> None:
    """Check a whole chat; a call that the template writes is one that the parser of its format reads."""
    source = (Path(__file__).parents[2] / "examples" / "gemma3_tools.jinja").read_text(encoding="utf-8")
    assert detect(source) == "pythonic"
    tokenizer = byte_level()
    template = ChatTemplate(source, tokenizer)
    functions = [
        {"function": {"name": "add", "arguments": {"a": 1.5, "said": 'a "b"\n', "deep": [True, None]}}},
        {"function": {"name": "clock", "arguments": {}}},
    ]
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi \n"},
        {"role": "assistant", "content": None, "tool_calls": functions},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "noon"},
    ]
    bos = tokenizer.special_tokens["bos_token"]
    text = template.render(messages, tools=TOOLS).removeprefix(bos)
    asked, calls, results, last = text.split("<end_of_turn>\n")
    assert asked.startswith("<start_of_turn>user\nBe brief.\n\nThese functions") and asked.endswith("\n\nHi")
    assert asked.count('\n{"name"') == 2
    assert results == "<start_of_turn>user\nResult of the call: 3\n\nResult of the call: noon"
    assert last == "<start_of_turn>model\n"
    parser = tool_format("pythonic", tokenizer).parser()
    events = [*parser.feed(calls.removeprefix("<start_of_turn>model\n"), None), *parser.end()]
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            found.append((event.name, ""))
        elif isinstance(event, CallArguments):
            found[-1] = (found[-1][0], found[-1][1] + event.text)
    assert [(name, json.loads(said)) for name, said in found] == [
        (one["function"]["name"], one["function"]["arguments"]) for one in functions
    ]
    assert template.render(messages[1:2]) == f"{bos}<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
