"""Measurement of mask times: which states are visited, and that it is bounded. Time is simulated."""

import pytest

from roseinfer.grammar import mask_time
from roseinfer.grammar.build import build_grammar, prove_grammar
from roseinfer.grammar.constraint import JSON_OBJECT, Choice, Constraint, GrammarText, JsonSchema
from roseinfer.grammar.library import Grammar, GrammarTokens, Matcher, MatcherError, compile_grammar
from roseinfer.grammar.mask_time import mask_time_s
from tests.helpers.grammars import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
TOKENS = GrammarTokens.of(TOKENIZER, TOKENIZER.vocab_size, [0])


def compiled(constraint: Constraint) -> Grammar:
    return compile_grammar(build_grammar(constraint, {}).grammar, TOKENS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Have each mask take `mask_s` on a simulated clock."""
    clock = {"now_s": 0.0, "mask_s": 0.001, "masks": 0.0}
    fill = Matcher.fill

    def slow(self: Matcher, words: memoryview) -> None:
        fill(self, words)
        clock["now_s"] += clock["mask_s"]
        clock["masks"] += 1

    monkeypatch.setattr(Matcher, "fill", slow)
    monkeypatch.setattr(mask_time, "thread_time", lambda: clock["now_s"])
    return clock


def test_the_time_of_a_mask_is_reported_with_the_grammar(clock: dict[str, float]) -> None:
    made = prove_grammar(build_grammar(JSON_OBJECT, {}), TOKENS)
    assert made.mask_s == pytest.approx(0.001)


def test_masks_within_a_literal_are_measured(clock: dict[str, float]) -> None:
    assert mask_time_s(compiled(Choice(["a" * 8000])), TOKENS) == pytest.approx(0.001)
    assert clock["masks"] > 20


def test_the_measurement_is_bounded_in_time(clock: dict[str, float]) -> None:
    clock["mask_s"] = 0.05
    assert mask_time_s(compiled(JSON_OBJECT), TOKENS) > 0.02
    assert clock["masks"] < 10


def test_the_measurement_is_deterministic(clock: dict[str, float]) -> None:
    drawn: list[list[int]] = []

    class RecordingMatcher(Matcher):
        def consume(self, token_ids) -> None:
            drawn[-1] += token_ids
            super().consume(token_ids)

    for _ in range(2):
        drawn.append([])
        grammar = compiled(JsonSchema(schema={"type": "array", "items": {"type": "string"}}))
        grammar.matcher = lambda grammar=grammar: RecordingMatcher(grammar)
        mask_time_s(grammar, TOKENS)
    assert drawn[0] == drawn[1] and len(drawn[0]) > 20


def test_a_state_beyond_the_limits_ends_the_measurement_without_an_error() -> None:
    rules = "".join(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}\n" for i in range(100))
    grammar = compiled(GrammarText(f'start: r0\n{rules}r100: "a"'))
    with pytest.raises(MatcherError):
        matcher = grammar.matcher()
        words = memoryview(bytearray(4 * -(-TOKENS.vocab_size // 32))).cast("I")
        for token in TOKENS.spell(b"a") * 30:
            matcher.fill(words)
            matcher.consume((token,))
    assert mask_time_s(grammar, TOKENS) > 0


def test_an_empty_output_takes_no_time() -> None:
    assert mask_time_s(compiled(Choice([""])), TOKENS) == 0
