"""Wrapper of the grammar library: errors are raised, and masks hold the tokens that may come next."""

from array import array

import pytest

from roseinfer.core.plan import TokenMasks
from roseinfer.grammar.library import (
    GrammarError,
    GrammarTokens,
    MaskThreads,
    MatcherError,
    UnsupportedTokenizerError,
    compile_grammar,
)
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import EOS_ID, byte_tokenizer
from tests.text.tokenizers import byte_fallback, byte_level, word_piece

VOCAB = 300  # more than the tokenizer knows, as models' are


def tokens_of(tokenizer: Tokenizer | None = None, vocab_size: int = VOCAB, eos_ids=(EOS_ID,)) -> GrammarTokens:
    return GrammarTokens.of(tokenizer or byte_tokenizer(), vocab_size, eos_ids)


def allowed(words: memoryview) -> set[int]:
    return {32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def line(vocab_size: int = VOCAB) -> memoryview:
    return memoryview(array("I", [0xFFFFFFFF] * TokenMasks.words_per_row(vocab_size)))


def mask(matcher) -> set[int]:
    words = line()
    matcher.fill(words)
    return allowed(words)


def test_a_mask_holds_the_tokens_that_may_come_next():
    matcher = compile_grammar('start: "a" /[bc]{1,2}/', tokens_of()).matcher()
    assert mask(matcher) == {ord("a")}
    matcher.consume(b"a")
    assert mask(matcher) == {*b"bc"} and not matcher.complete
    matcher.consume(b"b")
    assert mask(matcher) == {*b"bc", EOS_ID} and not matcher.complete
    assert matcher.allows(b"c") and not matcher.allows(b"cc") and not matcher.allows(b"a")
    matcher.consume([EOS_ID])
    assert matcher.complete


def test_a_grammar_is_complete_once_nothing_may_follow():
    matcher = compile_grammar('start: "ab"', tokens_of()).matcher()
    matcher.consume(b"ab")
    assert matcher.complete and not matcher.failed


def test_matchers_are_independent():
    grammar = compile_grammar('start: "ab"', tokens_of())
    first, second = grammar.matcher(), grammar.matcher()
    first.consume(b"a")
    assert (mask(first), mask(second)) == ({ord("b")}, {ord("a")})


def test_a_forbidden_token_is_an_error_that_stays():
    matcher = compile_grammar('start: "ab"', tokens_of()).matcher()
    with pytest.raises(MatcherError, match="doesn't satisfy the grammar"):
        matcher.consume(b"x")
    assert matcher.failed and not matcher.complete
    with pytest.raises(MatcherError):
        matcher.fill(line())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Empty grammar"),
        ("start: unknown_rule", "unknown name"),
        ('start: "a', "."),
        ("{}", "."),
        ('{"grammars": [{"json_schema": {"type": 3}}]}', "."),
        ("start: again\nagain: again", "."),
    ],
)
def test_grammars_without_an_output_are_rejected(text: str, words: str):
    with pytest.raises(GrammarError, match=words) as raised:
        compile_grammar(text, tokens_of())
    assert raised.value.code == "invalid_grammar"
    assert "non-verbose" not in raised.value.message


def test_a_schema_that_only_refers_to_itself_is_refused_although_it_compiles():
    import llguidance

    schema = {"$ref": "#/$defs/N", "$defs": {"N": {"$ref": "#/$defs/N"}}}
    with pytest.raises(GrammarError):
        compile_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema), tokens_of())


@pytest.mark.parametrize(
    ("tokenizer", "eos_ids", "vocab_size", "words"),
    [
        (word_piece(), (1,), VOCAB, "not pieces of its text"),
        (byte_level(), (), 400, "no token that ends"),
        (byte_level(), (500,), 400, "outside the vocabulary"),
        (byte_level(), (1,), 20, "vocab size too small"),
    ],
)
def test_unsupported_tokenizers_are_rejected(tokenizer, eos_ids, vocab_size, words):
    with pytest.raises(UnsupportedTokenizerError, match=words) as raised:
        tokens_of(tokenizer, vocab_size, eos_ids)
    assert raised.value.code == "unsupported_tokenizer"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tokens_have_the_bytes_of_the_tokenizer(make):
    tokenizer = make()
    tokens = tokens_of(tokenizer, 600, (1, 2))
    for token in set(range(tokenizer.vocab_size)) - tokenizer.special_ids - set(tokenizer.fallback_bytes):
        own = tokenizer.token_bytes(token)
        assert own == b"\xff" or tokens.raw.decode_bytes([token]) == own, "no text holds the byte 255"
    spelt = tokens.spell("héllo 日本".encode())
    assert b"".join(map(tokenizer.token_bytes, spelt)).strip() == "héllo 日本".encode()


def test_an_end_token_may_be_missing_from_the_tokenizer():
    tokens = tokens_of(byte_tokenizer(), 400, (EOS_ID, 390))
    matcher = compile_grammar('start: "é" "a"?', tokens).matcher()
    assert tokens.spell("é".encode()) == [*"é".encode()]
    matcher.consume("é".encode())
    words = line(400)
    matcher.fill(words)
    assert allowed(words) == {ord("a"), EOS_ID, 390}
    matcher.consume([390])
    assert matcher.complete


def test_every_end_token_ends_a_grammar():
    matcher = compile_grammar('start: "a"?', tokens_of(byte_level(), 400, (1, 2))).matcher()
    words = line(400)
    matcher.fill(words)
    assert {1, 2} < allowed(words)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_compute_the_masks_of_each_matcher(threads: int):
    grammar = compile_grammar("start: /[a-z]{40}/", tokens_of())
    matchers = [grammar.matcher() for _ in range(20)]
    for count, matcher in enumerate(matchers):
        matcher.consume(b"x" * (2 * count))
    matchers.append(broken := grammar.matcher())
    with pytest.raises(MatcherError):
        broken.consume(b"7")
    size = TokenMasks.words_per_row(VOCAB)
    words = memoryview(array("I", bytes(4 * size * len(matchers))))
    pool = MaskThreads(threads)
    for _ in range(12):  # both ways
        words[:] = memoryview(array("I", bytes(words.nbytes)))
        pool.fill(matchers, words)
        for at, matcher in enumerate(matchers[:-1]):
            assert allowed(words[at * size : (at + 1) * size]) == mask(matcher)
    assert [matcher.failed for matcher in matchers] == [False] * 20 + [True]


@pytest.mark.parametrize("vocab_size", [287, 288, 289, 320])
def test_the_first_mask_has_the_length_of_a_row(vocab_size: int):
    grammar = compile_grammar('start: "a"', tokens_of(vocab_size=vocab_size))
    first, second = (grammar.matcher() for _ in range(2))
    words = memoryview(array("I", bytes(8 * TokenMasks.words_per_row(vocab_size))))
    MaskThreads(1).fill([first, second], words)
    half = len(words) // 2
    assert allowed(words[:half]) == allowed(words[half:]) == {ord("a")}


def test_threads_handle_steps_of_only_first_masks():
    grammar = compile_grammar('start: "ab"', tokens_of())
    matchers = [grammar.matcher() for _ in range(20)]
    size = TokenMasks.words_per_row(VOCAB)
    words = memoryview(array("I", bytes(4 * size * len(matchers))))
    pool = MaskThreads(2)
    for _ in range(12):  # both ways
        words[:] = memoryview(array("I", bytes(words.nbytes)))
        pool.fill(matchers, words)
        assert all(allowed(words[at * size : (at + 1) * size]) == {ord("a")} for at in range(len(matchers)))


def test_matchers_are_distributed_over_lanes():
    text = 'start: "ab" /[c-e]{3,8}/ "f"'
    grammar, tokens = compile_grammar(text, tokens_of()), tokens_of()
    early = [grammar.matcher() for _ in range(6)]
    for count, matcher in enumerate(early):
        matcher.consume(b"abcdec"[:count])
        matcher.change_lane()
    assert len({matcher.lane for matcher in early}) == 1 and not grammar.wide
    before = [mask(matcher) for matcher in early]
    grammar.widen([compile_grammar(text, tokens) for _ in range(2)])
    for matcher in early:
        matcher.change_lane()
    assert grammar.lanes == 3
    lanes = [matcher.lane for matcher in early]
    assert sorted(lanes.count(lane) for lane in set(lanes)) == [2, 2, 2]
    assert [mask(matcher) for matcher in early] == before
    early[5].consume(b"ccf")
    assert early[5].complete
    late = [grammar.matcher() for _ in range(3)]
    assert {matcher.lane for matcher in late} == set(lanes)
    for matcher in [*early, *late]:
        matcher.change_lane()
    assert [matcher.lane for matcher in early] == lanes, "once"


def test_a_matcher_with_many_tokens_keeps_its_lane():
    text = "start: /[a-z]{400}/"
    grammar = compile_grammar(text, tokens_of())
    near, far = grammar.matcher(), grammar.matcher()
    far.consume(b"x" * 300)
    grammar.widen([compile_grammar(text, tokens_of()) for _ in range(3)])
    lane = far.lane
    for matcher in (far, near):
        matcher.change_lane()
    assert far.lane == lane and near.lane != lane
