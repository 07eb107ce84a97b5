"""Recorded outputs of models and the events that a parser must return.

A recording's `expected` is a list of `["text", T]` and `["call", name, arguments, complete]`.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, OutputParser, Reasoning, Text, joined
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import CallParser, Tool
from roseinfer.text.tools.registry import tool_format
from tests.text import tokenizers as build

FOLDER = Path(__file__).parent / "recordings"
RECORDINGS = sorted(FOLDER.glob("*/*.json"))
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MARKS += ("<think>", "</think>")
# Id of a token that is no mark.
ORDINARY = 0


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@cache
def plain_tokenizer() -> Tokenizer:
    return build.byte_level()


@cache
def marked_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for every mark."""
    tokenizer = build.byte_level()
    tokenizer.backend.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    return Tokenizer(tokenizer.backend, tokenizer.config, None)


def recorded(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def parser_of(path: Path, tokenizer: Tokenizer) -> CallParser:
    tools = [Tool(tool["name"], tool.get("parameters")) for tool in recorded(path).get("tools", [])]
    return tool_format(path.parent.name, tokenizer).parser(tools)


def fed(parser: CallParser | OutputParser, pieces: Iterable[tuple[str, int | None]]) -> list[list[Any]]:
    """Feed pieces and return all events in the form of recordings."""
    events: list[Event] = []
    for text, id in pieces:
        events += parser.feed(text, id)
    return told(events + parser.end())


def told(events: Sequence[Event]) -> list[list[Any]]:
    said: list[list[Any]] = []
    open_call = -1
    for event in joined(events):
        if isinstance(event, CallStart):
            assert open_call < 0 and event.index == sum(entry[0] == "call" for entry in said)
            open_call = event.index
            said.append(["call", event.name, "", None])
        elif isinstance(event, CallArguments):
            assert event.index == open_call and event.text
            said[-1][2] += event.text
        elif isinstance(event, CallEnd):
            assert event.index == open_call
            open_call = -1
            said[-1][3] = event.complete
        else:
            assert event.text and open_call < 0, "nothing is said within a call"
            said.append(["reasoning" if isinstance(event, Reasoning) else "text", event.text])
            assert isinstance(event, Reasoning | Text)
    assert open_call < 0, "every call ends"
    return said


def by_ids(tokenizer: Tokenizer, text: str) -> list[tuple[str, int]]:
    """Split the text as a model with a token for each mark does: marks whole, other text by character."""
    pieces: list[tuple[str, int]] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        id = None if mark is None else tokenizer.backend.token_to_id(mark)
        pieces.append((mark, id) if mark is not None and id is not None else (text[0], ORDINARY))
        text = text[len(pieces[-1][0]) :]
    return pieces
