"""Lines that a terminal shows of a streamed text."""

import re

import pytest

from roseinfer.cli.terminal.word_wrap import WordWrap


def shown(text: str, columns: int, piece: int) -> list[str]:
    """Return the lines of a terminal that gets the text in pieces. It obeys what `WordWrap` writes."""
    wrap, lines = WordWrap(lambda: columns), [""]
    written = "".join(wrap(text[at : at + piece]) for at in range(0, len(text), piece))
    for left, char in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.|\n)", written):
        if left:
            assert len(lines[-1]) >= int(left)
            lines[-1] = lines[-1][: -int(left)]
        elif char == "\n":
            lines.append("")
        else:
            lines[-1] += char
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("piece", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("one two  three", ["one two", "three"]),
        ("12345678 x", ["12345678", "x"]),
        ("1234567890123", ["12345678", "90123"]),
        ("one\ntwo three", ["one", "two", "three"]),
        ("a 日本語日本語", ["a 日本語", "日本語"]),
        ("```\nx = 'a long line'\n```\none two three", ["```", "x = 'a long line'", "```", "one two", "three"]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str], piece: int) -> None:
    assert shown(text, 8, piece) == lines


def test_a_new_text_begins_in_the_first_column() -> None:
    wrap = WordWrap(lambda: 8)
    assert wrap("```\none two") == "```\none two"
    wrap.reset()
    assert wrap("12345678") == "12345678"
