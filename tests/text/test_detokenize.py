"""Incremental detokenisation: all emitted text together equals the decoding of all ids at once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.text.detokenize import IncrementalDetokenizer
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.cases import examples
from tests.text import tokenizers as build

BUILDERS = [build.byte_level, build.byte_fallback, build.word_piece, build.undecorated]
TEXT = "héllo 日本 😀👩‍👩‍👧, wörld\n\n  \ufffd end é"


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda builder: builder.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


def streamed(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.add(piece) for piece in pieces), detokenizer.flush()]


def whole(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    """Decode with the library."""
    return tokenizer.backend.decode(ids, skip_special_tokens=skip)


def singles(ids: list[int]) -> list[list[int]]:
    return [[id] for id in ids]


@pytest.mark.parametrize("builder", [build.byte_level, build.byte_fallback])
def test_every_split_of_multibyte_text(builder):
    tokenizer = builder()
    ids = tokenizer.encode(TEXT)
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            pieces = [ids[:first], ids[first:second], ids[second:]]
            assert "".join(streamed(tokenizer, pieces)) == whole(tokenizer, ids) == TEXT


@pytest.mark.parametrize("builder", [build.byte_level, build.byte_fallback])
def test_no_piece_shows_half_a_character(builder):
    tokenizer = builder()
    text = "日本語😀 a 👩‍👩‍👧b"
    assert all("\ufffd" not in piece for piece in streamed(tokenizer, singles(tokenizer.encode(text))))


@pytest.mark.parametrize("builder", [build.byte_level, build.byte_fallback])
def test_text_comes_as_soon_as_it_is_complete(builder):
    tokenizer = builder()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("hello world")
    assert [bool(detokenizer.add([id])) for id in ids[1:]] == [True] * (len(ids) - 1)
    assert detokenizer.flush() == ""


def test_random_ids(tokenizer):
    """Use invalid UTF-8, special tokens anywhere, and ids outside the vocabulary."""
    rng = random.Random(1)
    for _ in range(1000):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(24))]
        skip = rng.random() < 0.5
        expected = whole(tokenizer, ids, skip)
        assert "".join(streamed(tokenizer, singles(ids), skip)) == expected
        cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(3))
        pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        assert "".join(streamed(tokenizer, pieces, skip)) == expected


BYTE_LEVEL, BYTE_FALLBACK = build.byte_level(), build.byte_fallback()


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the id of each single-byte token by its value."""
    one_byte = ((tokenizer.token_bytes(id), id) for id in range(tokenizer.vocab_size))
    return {raw[0]: id for raw, id in one_byte if len(raw) == 1}


@examples(300)
@given(raw=st.binary(max_size=24), tokenizer=st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]))
def test_any_bytes(raw, tokenizer):
    ids_of = byte_ids(tokenizer)
    ids = [ids_of[byte] for byte in raw]
    assert "".join(streamed(tokenizer, singles(ids))) == whole(tokenizer, ids)


@examples(300)
@given(text=st.text(max_size=40), tokenizer=st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]))
def test_any_text(text, tokenizer):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(streamed(tokenizer, singles(ids))) == whole(tokenizer, ids)


def test_one_bad_byte_spoils_its_whole_run_with_byte_fallback():
    """Check that nothing of a run is sent before it has ended."""
    ids_of = byte_ids(BYTE_FALLBACK)
    ids = [ids_of[0x35], ids_of[0xE9], *BYTE_FALLBACK.encode("h", add_special_tokens=False)]
    assert streamed(BYTE_FALLBACK, singles(ids)) == ["", "", "\ufffd\ufffd h", ""]


@pytest.mark.parametrize(
    "tokenizer",
    [
        pytest.param(BYTE_LEVEL, id="byte_level"),
        pytest.param(BYTE_FALLBACK, id="byte_fallback", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("endless", ["special", "bad byte", "replacement character", "unknown id"])
def test_very_long_monotonous_sequences(tokenizer, endless):
    """Decode a sequence for which a growing window would take minutes."""
    ids_of = byte_ids(tokenizer)
    unit = {
        "special": [tokenizer.eos_token_id],
        "bad byte": [ids_of[0xFF]],
        "replacement character": tokenizer.encode("\ufffd", add_special_tokens=False),
        "unknown id": [tokenizer.vocab_size + 7],
    }[endless]
    ids = [*tokenizer.encode("hello"), *unit * 30_000, *tokenizer.encode("hello", add_special_tokens=False)]
    assert "".join(streamed(tokenizer, singles(ids))) == whole(tokenizer, ids)


def test_unfinished_character_at_the_end():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    ids_of = byte_ids(BYTE_LEVEL)
    assert detokenizer.add([ids_of[0x61], ids_of[0xF0], ids_of[0x9F]]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_shown_on_request():
    ids = [*BYTE_LEVEL.encode("hello"), BYTE_LEVEL.eos_token_id]
    assert "".join(streamed(BYTE_LEVEL, singles(ids), skip=False)) == "<|endoftext|>hello<|end|>"
    assert "".join(streamed(BYTE_LEVEL, singles(ids))) == "hello"
