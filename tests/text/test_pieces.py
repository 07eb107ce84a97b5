"""Encoding of a long text in pieces gives the tokens of the whole text."""

import pytest

from roseinfer.text import pieces
from roseinfer.text.pieces import encode_long
from roseinfer.text.tokenizer import Tokenizer, encode
from tests.text import tokenizers as build

TEXT = "Größer als\tdas Meer 日本 語,  it's <|end|> 12345 \n\n x" * 40 + "a" * 900 + " b c" * 300
TOKENIZERS = [build.byte_level, build.byte_fallback, build.word_piece, build.undecorated]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIECE_CHARS", 300), ("MARGIN_CHARS", 100), ("REACH_CHARS", 100)):
        monkeypatch.setattr(pieces, name, value)


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("keep_last", [None, 1, 2, 50])
def test_tokens_equal_those_of_the_whole_text(make: type[Tokenizer], special: bool, keep_last: int | None) -> None:
    backend = make().backend
    found = encode_long(backend, TEXT, special, keep_last, None)
    assert found.tolist() == encode(backend, TEXT, special, keep_last)


def test_a_text_is_cut_into_pieces() -> None:
    found = list(pieces.pieces(build.byte_level().backend, TEXT))
    assert "".join(found) == TEXT and len(found) > 8


def test_encoding_ends_soon_after_the_bound() -> None:
    found = encode_long(build.byte_level().backend, TEXT, False, None, 100)
    assert 100 < len(found) < 100 + 600
