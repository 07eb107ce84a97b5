"""Harmony's parser: recorded streams at every cut, malformed ones, random ones."""

import random
from typing import Any

import pytest

from roseinfer.server.formats.chat_events import message
from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.harmony.format import Harmony
from roseinfer.text.output import Event, OutputParser, TextBreak
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import Tool
from tests.text.tokenizers import harmony, tool_caller
from tests.text.tools.recorded import told

TOKENIZER = harmony()
FORMAT = Harmony(TOKENIZER)
PROMPT = TOKENIZER.encode("<|start|>user<|message|>Hi<|end|><|start|>assistant")
TOOLS = [Tool("weather"), Tool("clock")]
THINKS = "<|channel|>analysis<|message|>Rain, I guess.<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln 😀"}'
CALLED: list[Any] = ["call", "weather", '{"city": "Köln 😀"}', True]
THOUGHT = ["reasoning", "Rain, I guess."]
# Output after `<|start|>assistant` -> what is said.
STREAMS: dict[str, tuple[str, list[list[Any]]]] = {
    "answer": ("<|channel|>final<|message|>Dry.", [["text", "Dry."]]),
    "thinks and answers": (f"{THINKS}{NEXT}<|channel|>final<|message|>Dry.", [THOUGHT, ["text", "Dry."]]),
    "answer with its end": ("<|channel|>final<|message|>Dry.<|return|>", [["text", "Dry."]]),
    "calls": (f"{THINKS}{NEXT}{CALL}<|call|>", [THOUGHT, CALLED]),
    "calls without its end": (f"{THINKS}{NEXT}{CALL}", [THOUGHT, CALLED]),
    "recipient in the role": (
        f'{THINKS}{NEXT} to=functions.clock<|channel|>commentary json<|message|>{{"at": 1}} <|call|>',
        [THOUGHT, ["call", "clock", '{"at": 1}', True]],
    ),
    "recipient at once": (
        " to=functions.clock<|channel|>commentary<|message|>\n{}<|call|>",
        [["call", "clock", "{}", True]],
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.clock<|message|><|call|>",
        [["call", "clock", "{}", True]],
    ),
    "preamble": (
        f"{THINKS}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}",
        [THOUGHT, ["text", "I look."], CALLED],
    ),
    "several calls": (f"{CALL}<|end|>{NEXT}{CALL}<|call|>", [CALLED, CALLED]),
    "call from analysis": (
        "<|channel|>analysis to=functions.clock<|message|>{}<|call|>",
        [["call", "clock", "{}", True]],
    ),
    "built-in tool": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        [["reasoning", "print(1)"]],
    ),
    "tool without its namespace": (
        "<|channel|>commentary to=clock<|message|>{}<|call|>",
        [["call", "clock", "{}", True]],
    ),
    "unknown tool": (
        "<|channel|>commentary to=functions.nothing<|message|>{}<|call|>",
        [["call", "nothing", "{}", True]],
    ),
    "unknown channel": ("<|channel|>musings<|message|>Dry.", [["text", "Dry."]]),
    "no channel": ("<|message|>Dry.", [["text", "Dry."]]),
    "glued header": ("<|channel|>analysisWe think<|message|>Rain.", [["reasoning", "Rain."]]),
    "typed answer": ("<|channel|>final <|constrain|>json<|message|>{}", [["text", "{}"]]),
    "no start": (f"{THINKS}<|channel|>final<|message|>Dry.", [THOUGHT, ["text", "Dry."]]),
    "no end": (
        "<|channel|>analysis<|message|>Rain.<|channel|>final<|message|>Dry.",
        [["reasoning", "Rain."], ["text", "Dry."]],
    ),
    "two channels": ("<|channel|>analysis<|channel|>final<|message|>Dry.", [["text", "Dry."]]),
    "marks in content": ("<|channel|>final<|message|>D<|message|>r<|constrain|>y.", [["text", "Dry."]]),
    "header only": ("<|channel|>final to=nobody", []),
    "nothing but text": ("Dry.", []),
    "ended header": (f"<|channel|>final<|end|>{NEXT}<|channel|>final<|message|>Dry.", [["text", "Dry."]]),
    "malformed arguments": (
        "<|channel|>commentary to=functions.clock<|message|>now!<|call|>",
        [["call", "clock", "now!", False]],
    ),
    "text after arguments": (
        "<|channel|>commentary to=functions.clock<|message|>{} or so<|call|>",
        [["call", "clock", "{} or so", False]],
    ),
    "cut arguments": (
        '<|channel|>commentary to=functions.clock<|message|>{"a',
        [["call", "clock", '{"a', False]],
    ),
    "person": ("<|channel|>commentary to=user<|message|>I look.", [["text", "I look."]]),
}
streams = pytest.mark.parametrize(("text", "expected"), STREAMS.values(), ids=STREAMS)


def parser(prompt: list[int] = PROMPT, tools: list[Tool] | None = TOOLS, reasoning: bool = True) -> OutputParser:
    chosen = FORMAT if reasoning else Harmony(TOKENIZER, reasoning=False)
    return chosen.parser(chosen.begun(prompt), tools)


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def tokens(text: str) -> list[tuple[str, int]]:
    return pieces_of(encoded(text))


def pieces_of(ids: list[int]) -> list[tuple[str, int]]:
    """Return the tokens with the text that each adds."""
    text = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=False)
    return [(text.add([id]), id) for id in ids]


def fed(reader: OutputParser, pieces: list[tuple[str, int]]) -> list[Event]:
    return [event for piece in pieces for event in reader.feed(*piece)]


def said(pieces: list[tuple[str, int]], **options: Any) -> list[list[Any]]:
    reader = parser(**options)
    return shown(fed(reader, pieces) + reader.end())


def shown(events: list[Event]) -> list[list[Any]]:
    return told([event for event in events if not isinstance(event, TextBreak)])


@streams
def test_streams(text: str, expected: list[list[Any]]) -> None:
    assert said(tokens(text)) == expected


def texts(events: list[list[Any]]) -> str:
    return "".join(entry[2] if entry[0] == "call" else entry[1] for entry in events)


@streams
def test_a_stream_that_is_cut_says_the_beginning(text: str, expected: list[list[Any]]) -> None:
    pieces = tokens(text)
    for at in range(len(pieces) + 1):
        cut = said(pieces[:at])
        assert len(cut) <= len(expected) and texts(expected).startswith(texts(cut)), at
        assert cut[:-1] == expected[: max(len(cut) - 1, 0)]
        reader = parser()
        assert shown(fed(reader, pieces[:at]) + fed(reader, pieces[at:]) + reader.end()) == expected


def test_a_message_that_the_prompt_begins() -> None:
    opened = [*PROMPT, *encoded("<|channel|>final<|message|>It is")]
    assert said(tokens(" dry."), prompt=opened) == [["text", " dry."]]
    opened = [*PROMPT, *encoded("<|channel|>analysis<|message|>Let me")]
    assert said(tokens(f" see.<|end|>{NEXT}{CALL}"), prompt=opened) == [["reasoning", " see."], CALLED]
    opened = [*PROMPT, *encoded("<|channel|>")]
    assert said(tokens("final<|message|>dry."), prompt=opened) == [["text", "dry."]]
    ended = encoded("<|start|>user<|message|>Hi<|end|>")
    assert said(tokens(f"{NEXT}<|channel|>final<|message|>dry."), prompt=ended) == [["text", "dry."]]


def test_without_tools_nothing_is_a_call() -> None:
    assert said(tokens(f"{THINKS}{NEXT}{CALL}"), tools=None) == [THOUGHT, ["text", CALLED[2]]]


def test_without_reasoning_all_of_it_is_text() -> None:
    assert said(tokens(THINKS), reasoning=False) == [["text", "Rain, I guess."]]


def test_two_messages_are_not_one() -> None:
    reader = parser()
    answer = f"<|channel|>commentary<|message|>One.<|end|>{NEXT}<|channel|>final<|message|>Two."
    events = fed(reader, tokens(answer)) + reader.end()
    at = events.index(TextBreak())
    assert shown(events[:at]) == [["text", "One."]] and shown(events[at + 1 :]) == [["text", "Two."]]
    assert said(tokens(f"{THINKS}{NEXT}{THINKS}")) == [["reasoning", "Rain, I guess.\n\nRain, I guess."]]


@pytest.mark.parametrize("between", [THINKS, f"{CALL}<|end|>"])
def test_two_texts_with_another_message_between_are_not_one(between: str) -> None:
    answer = f"<|channel|>commentary<|message|>One.<|end|>{NEXT}{between}{NEXT}<|channel|>final<|message|>Two."
    reader = parser()
    assert message(fed(reader, tokens(answer)) + reader.end())["content"] == "One.\n\nTwo."


def test_two_reasonings_with_a_text_between_are_not_one() -> None:
    answer = f"{THINKS}{NEXT}<|channel|>commentary<|message|>One.<|end|>{NEXT}{THINKS}"
    reader = parser()
    said = message(fed(reader, tokens(answer)) + reader.end())
    assert said["reasoning"] == "Rain, I guess.\n\nRain, I guess."


def test_tokens_of_the_reasoning_are_counted_with_header_and_end() -> None:
    reader = parser()
    fed(reader, tokens(f"{THINKS}{NEXT}<|channel|>final<|message|>Dry."))
    assert reader.reasoning_tokens == len(encoded(THINKS))
    cut = parser()
    fed(cut, tokens("<|channel|>analysis<|message|>Rain"))
    assert cut.reasoning_tokens == len(encoded("<|channel|>analysis<|message|>Rain"))


@pytest.mark.parametrize(
    ("name", "failures"), [("calls", 0), ("malformed arguments", 1), ("text after arguments", 1), ("cut arguments", 0)]
)
def test_malformed_calls_are_counted(name: str, failures: int) -> None:
    reader = parser()
    fed(reader, tokens(STREAMS[name][0]))
    reader.end()
    assert reader.failures == failures


WORDS = [
    "analysis",
    "final",
    "commentary",
    "x",
    "y z",
    " to=functions.weather",
    " to=python",
    '{"a": 1}',
    '{"a": [',
    "é",
]
MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"]


def contents(ids: list[int], tokenizer: Tokenizer) -> str:
    """Text outside of headers, without white space."""
    found: list[int] = []
    marks = {tokenizer.backend.token_to_id(mark): mark for mark in MARKS}
    in_header = True
    for id in ids:
        mark = marks.get(id)
        if mark is None:
            found += [] if in_header else [id]
        elif mark == "<|message|>":
            in_header = False
        elif mark != "<|constrain|>":
            in_header = True
    return "".join(tokenizer.decode(found).split())


def test_random_tokens_lose_no_text() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        pieces = rng.choices(WORDS + MARKS * 2, k=rng.randint(0, 40))
        ids = [id for piece in pieces for id in encoded(piece)]
        reader = parser()
        text = texts(shown(fed(reader, pieces_of(ids)) + reader.end()))
        assert "".join(text.replace("{}", "").split()) == contents(ids, TOKENIZER)


def test_a_tokenizer_without_its_tokens_has_no_harmony() -> None:
    assert Harmony.used_by(TOKENIZER) and not Harmony.used_by(tool_caller())
    assert not Harmony.used_by(Tokenizer(TOKENIZER.backend, TOKENIZER.config, "{{ messages }}"))
