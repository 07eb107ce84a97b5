from dataclasses import replace

import pytest

from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.spec import LayerSpec, ModelSpec, NormSpec
from roseinfer.runner.start_notes import share_beyond_windows, start_notes

WIDE = AttentionSpec(heads=4, kv_heads=4, head_dim=16, scale=0.25)
NARROW = replace(WIDE, kv_heads=1)


def spec_of(*attention: AttentionSpec) -> ModelSpec:
    return ModelSpec(
        architecture="Any",
        layers=tuple(LayerSpec(attention=one) for one in attention),
        hidden_size=64,
        intermediate_size=64,
        vocab_size=100,
        max_position=4000,
        norm=NormSpec(eps=1e-5),
        activation="silu",
        tied_embeddings=False,
        dtype="float32",
    )


def test_full_attention_has_no_notes() -> None:
    assert list(start_notes(spec_of(WIDE, NARROW), 4000)) == []


def test_layers_with_windows_are_weighted_by_their_heads() -> None:
    spec = spec_of(WIDE, replace(NARROW, window=1000))
    # A fifth of the memory belongs to the layer with a window, which needs a quarter of it.
    assert share_beyond_windows(spec, 4000) == pytest.approx(0.2 * 0.75)
    (note,) = start_notes(spec, 4000)
    assert note.startswith("1 of 2 layers attend to a window only") and "4000 tokens, 15% of the KV memory" in note


def test_a_context_within_the_window_has_no_notes() -> None:
    assert list(start_notes(spec_of(replace(WIDE, window=1000)), 1000)) == []
