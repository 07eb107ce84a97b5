"""Recordings, split in every way: streamed events and whole answers both equal the recorded ones."""

import json
import random
from pathlib import Path

import pytest

from roseinfer.text.tools.registry import format_names
from tests.text.tools.recorded import (
    ORDINARY,
    RECORDINGS,
    by_ids,
    fed,
    marked_tokenizer,
    name_of,
    parser_of,
    plain_tokenizer,
    recorded,
)

recordings = pytest.mark.parametrize("path", RECORDINGS, ids=name_of)


def random_cut(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_every_format_has_recordings():
    assert {path.parent.name for path in RECORDINGS} == set(format_names())
    for name in format_names():
        assert sum(path.parent.name == name for path in RECORDINGS) >= 10, name


@recordings
def test_whole(path: Path):
    record = recorded(path)
    parser = parser_of(path, plain_tokenizer())
    assert fed(parser, [(record["output"], ORDINARY)]) == record["expected"]
    assert parser.failures == record["failures"]
    for kind, *call in record["expected"]:
        if kind == "call" and call[2]:
            assert isinstance(json.loads(call[1]), dict), "complete arguments are JSON"


@pytest.mark.exhaustive
@recordings
def test_every_split_in_two(path: Path):
    record = recorded(path)
    text = record["output"]
    for at in range(len(text) + 1):
        said = fed(parser_of(path, plain_tokenizer()), [(text[:at], ORDINARY), (text[at:], ORDINARY)])
        assert said == record["expected"], at


@recordings
def test_random_splits(path: Path):
    record = recorded(path)
    rng = random.Random(path.stem)
    cuts = [list(record["output"]), *(random_cut(record["output"], rng) for _ in range(20))]
    for pieces in cuts:
        parser = parser_of(path, plain_tokenizer())
        assert fed(parser, [(piece, ORDINARY) for piece in pieces]) == record["expected"], pieces
        assert parser.failures == record["failures"]


@recordings
def test_marks_that_are_tokens(path: Path):
    """Feed marks by id, and by text where the tokens are unknown."""
    record = recorded(path)
    tokenizer = marked_tokenizer()
    if path.stem != "cut_in_second_mark":  # a token is never split
        assert fed(parser_of(path, tokenizer), by_ids(tokenizer, record["output"])) == record["expected"]
    assert fed(parser_of(path, tokenizer), [(char, None) for char in record["output"]]) == record["expected"]


@pytest.mark.parametrize(
    "path", [path for path in RECORDINGS if path.parent.name in ("hermes", "mistral")], ids=name_of
)
def test_spelled_marks_are_text_where_they_are_tokens(path: Path):
    text = recorded(path)["output"]
    assert fed(parser_of(path, marked_tokenizer()), [(char, ORDINARY) for char in text]) == [["text", text]]
