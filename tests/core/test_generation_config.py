"""Sampling fields of conversations."""

import pytest

from roseinfer.core.generation_config import CONVERSATION_DEFAULTS, conversation_sampling


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ({}, CONVERSATION_DEFAULTS),
        ({"repetition_penalty": 1.1}, {**CONVERSATION_DEFAULTS, "repetition_penalty": 1.1}),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"top_p": 1.0}, {"top_p": 1.0}),
    ],
)
def test_a_conversation_fills_in_only_what_the_model_leaves_open(
    model: dict[str, float], asked: dict[str, float]
) -> None:
    assert conversation_sampling(model) == asked
