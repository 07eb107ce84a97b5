"""Schemas of loads: which requests have one, and no output that ends before it has its tokens."""

import json
import random

import pytest

from roseinfer.bench.schemas import constrained, endless_schema
from roseinfer.grammar.library import compile_grammar
from tests.helpers.grammars import tiny_tokens


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.7, 1.0])
def test_a_share_of_the_requests_is_constrained_and_they_lie_evenly(share: float) -> None:
    chosen = [constrained(number, share) for number in range(100)]
    assert sum(chosen) == 100 * share
    assert all(abs(sum(chosen[at : at + 20]) - 20 * share) <= 1 for at in range(80))


@pytest.mark.parametrize("number", range(4))
def test_no_document_is_complete_before_the_output_has_its_tokens(number: int) -> None:
    """Draw allowed tokens, the longest with the probability of all others together divided by two."""
    most, rng = 60, random.Random(number)
    grammar = json.dumps({"grammars": [{"json_schema": endless_schema(number, most)}]})
    tokens = tiny_tokens()
    matcher = compile_grammar(grammar, tokens).matcher()
    for _ in range(most):
        mask = matcher.raw.compute_bitmask()
        allowed = [token for token in range(tokens.vocab_size) if mask[token // 8] >> token % 8 & 1]
        assert 0 not in allowed and not matcher.complete
        longest = max(allowed, key=lambda token: len(tokens.spelling(token)))
        matcher.consume([rng.choice([longest, rng.choice(allowed), rng.choice(allowed)])])
