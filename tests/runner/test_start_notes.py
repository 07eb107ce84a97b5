import logging
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.attention.groups import KVGroups
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.config.engine import CacheConfig
from roseinfer.models.spec import LayerSpec, ModelSpec, NormSpec
from roseinfer.runner.start_notes import (
    log_start_notes,
    share_beyond_windows,
    start_notes,
    warn_of_small_cache,
    warn_of_unused_sizes,
)
from tests.helpers.checkpoints import make_reference
from tests.helpers.gguf_files import write_model

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
    assert list(start_notes(spec_of(WIDE, NARROW), 4000, KVGroups.single(2), [9])) == []


def test_layers_with_windows_are_weighted_by_their_heads() -> None:
    spec = spec_of(WIDE, replace(NARROW, window=1000))
    # A fifth of the memory belongs to the layer with a window, which needs a quarter of it.
    assert share_beyond_windows(spec, 4000) == pytest.approx(0.2 * 0.75)
    (note,) = start_notes(spec, 4000, KVGroups.single(2), [9])
    assert note.startswith("1 of 2 layers attend to a window only") and "4000 tokens, 15% of the KV memory" in note
    (note,) = start_notes(spec, 4000, KVGroups.single(2), [9], hosted=True)
    assert "keep K and V of all tokens, as blocks in host memory hold all layers" in note
    (note,) = start_notes(spec, 4000, KVGroups.by_window(spec.attention, 4000), [900, 70])
    assert "KV blocks are 900 for all tokens, 70 for windows of 1000 tokens" in note and "saves 15%" in note


def test_a_context_within_the_window_has_no_notes() -> None:
    assert list(start_notes(spec_of(replace(WIDE, window=1000)), 1000, KVGroups.single(1), [9])) == []


@pytest.mark.parametrize(
    ("family", "name", "named", "window"),
    [
        ("starcoder2", "Starcoder2 3b", "StarCoder2", 4096),
        ("llama", "Ministral 8B Instruct 2410", "Ministral 8B", 32768),
        ("llama", "mistralai_mistral-7b-instruct-v0.1", "Mistral 7B v0.1", 4096),
        ("llama", "Mistral 7B Instruct v0.3", None, 4096),
        ("qwen3", "Qwen3 8B", None, 4096),
    ],
)
def test_a_window_that_a_gguf_file_does_not_record(
    family: str, name: str, named: str | None, window: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_model(tmp_path / "m.gguf", make_reference(family), **{"general.name": name})
    with caplog.at_level(logging.WARNING):
        groups = KVGroups.single(1)
        log_start_notes(spec_of(WIDE), file, window, groups, [9], 0, hosted=False)
        assert not caplog.records, "a context within the window"
        log_start_notes(spec_of(WIDE), file, window + 1, groups, [9], 0, hosted=False)
    warning = f"{named} has a window of {window} tokens, which its GGUF file does not record"
    assert caplog.text.count(warning) == len(caplog.records) == (named is not None)


@pytest.mark.parametrize(
    ("windows", "num_slots", "ignored"),
    [((), 0, ["state_slots", "typical_context"]), ((9,), 0, ["state_slots"]), ((), 4, [])],
)
def test_sizes_that_change_nothing_are_warned_of(
    windows: tuple[int, ...], num_slots: int, ignored: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unused_sizes(CacheConfig(), KVGroups((0, 0)), 0)
    assert not caplog.records, "defaults are not ignored"
    warn_of_unused_sizes(CacheConfig(state_slots=4, typical_context=100), KVGroups((0, 0), windows), num_slots)
    assert [record.getMessage().split()[0] for record in caplog.records] == ignored


@pytest.mark.parametrize(
    ("wanted", "cache_tokens", "warned"), [(None, 48, True), (None, 2048, False), (48, 48, False), (None, 4096, False)]
)
def test_a_context_that_the_cache_shortens_is_warned_of(
    wanted: int | None, cache_tokens: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_small_cache(wanted, 2048, cache_tokens)
    assert ("the context is 48 tokens instead of the model's 2048" in caplog.text) == warned == bool(caplog.records)
