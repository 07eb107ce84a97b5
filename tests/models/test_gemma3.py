"""Gemma 3: published configs in all spellings, fields that are refused by name, and rounding in bfloat16."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.models.decoder import Decoder
from roseinfer.models.generation import read_generation_config
from roseinfer.models.loader import resolve_dtype
from roseinfer.models.spec import ModelSpec
from tests.helpers.batches import HandRow, HandRunner, make_batch
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.loaded import load
from tests.models.test_hostile_files import check_mutations

FULL, SLIDING = "full_attention", "sliding_attention"
LOCAL, WHOLE = RopeSpec(theta=1e4), RopeSpec(theta=1e6)
STRETCHED = RopeSpec(theta=1e6, scaling="linear", factor=8.0)
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA3_270M = {
    **{key: value for key, value in GEMMA3_1B.items() if key not in ("cache_implementation", "sliding_window_pattern")},
    "_sliding_window_pattern": 6,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": [*[SLIDING] * 5, FULL] * 3,
    "num_hidden_layers": 18,
    "use_bidirectional_attention": False,
}


def with_vision(**text: Any) -> dict[str, Any]:
    """Return a config of the hub with a vision tower, which leaves most fields of its text model to defaults."""
    scaling = {"factor": 8.0, "rope_type": "linear"}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "rope_scaling": scaling, "sliding_window": 1024, **text},
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
    }


GEMMA3_4B = with_vision(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34)
GEMMA3_27B = with_vision(
    head_dim=128,
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_hidden_layers=62,
    num_key_value_heads=16,
    query_pre_attn_scalar=168,
)
# (config, heads, KV heads, head_dim, 1 / scale^2, window, layers, full layers, rotation of full layers)
PUBLISHED = {
    "270m": (GEMMA3_270M, 4, 1, 256, 256, 512, 18, 3, WHOLE),
    "1b": (GEMMA3_1B, 4, 1, 256, 256, 512, 26, 4, WHOLE),
    "4b": (GEMMA3_4B, 8, 4, 256, 256, 1024, 34, 5, STRETCHED),
    "27b": (GEMMA3_27B, 32, 16, 128, 168, 1024, 62, 10, STRETCHED),
}


def read(folder: Path, config: dict[str, Any], max_model_len: int | None = None, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return read_model_spec(folder, max_model_len)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str, tmp_path: Path) -> None:
    config, *numbers, window, layers, full_layers, full = PUBLISHED[name]
    spec = read(tmp_path, config)
    for number, layer in enumerate(spec.layers):
        is_full, found = number % 6 == 5, layer.attention
        assert [found.heads, found.kv_heads, found.head_dim, round(found.scale**-2)] == numbers
        assert (found.window, layer.rope) == ((None, full) if is_full else (window, LOCAL))
    assert (spec.num_layers, sum(window is None for window in spec.windows)) == (layers, full_layers)
    assert (spec.norm.offset, spec.norm.eps, spec.qk_norm, spec.activation) == (1.0, 1e-6, "head", "gelu_tanh")
    assert spec.tied_embeddings is True and spec.embedding_multiplier == spec.hidden_size**0.5
    assert (spec.logit_cap, spec.qkv_bias, spec.dtype) == (None, False, "bfloat16")
    with_tower = "text_config" in config
    assert spec.left_out == (("vision tower",) if with_tower else ())
    assert (spec.vocab_size, spec.max_position) == ((262208, 131072) if with_tower else (262144, 32768))
    assert read_generation_config(tmp_path).eos_token_ids == (1, 106)


@pytest.mark.parametrize("config", [GEMMA3_270M, GEMMA3_1B, GEMMA3_4B, GEMMA3_27B])
def test_transformers_spelling_with_all_defaults_means_the_same(config: dict[str, Any], tmp_path: Path) -> None:
    """Let transformers rewrite the config: it fills in its defaults and writes a rotation for each type of layer."""
    expected = read(tmp_path, config)
    config_class = "Gemma3Config" if "text_config" in config else "Gemma3TextConfig"
    getattr(transformers, config_class).from_dict(deepcopy(config)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in saved and set(saved.get("text_config", saved)["rope_parameters"]) == {FULL, SLIDING}
    assert read_model_spec(tmp_path) == expected
    assert read_generation_config(tmp_path).eos_token_ids == (1, 106)


def test_each_rotation_is_read(tmp_path: Path) -> None:
    """Compare values that no default could hide."""
    older = read(tmp_path, GEMMA3_1B, rope_theta=5e5, rope_local_base_freq=300.0)
    parameters = {FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_theta": 300.0}}
    rest = {key: value for key, value in GEMMA3_1B.items() if not key.startswith("rope_")}
    assert read(tmp_path, rest, rope_parameters=parameters) == older
    assert [older.layers[number].rope for number in (0, 5)] == [RopeSpec(theta=300.0), RopeSpec(theta=5e5)]
    assert read(tmp_path, rest, rope_parameters={FULL: parameters[FULL]}, rope_local_base_freq=300.0) == older


def test_full_layers_in_all_spellings(tmp_path: Path) -> None:
    expected = read(tmp_path, GEMMA3_1B, sliding_window_pattern=4)
    assert [number for number, window in enumerate(expected.windows) if window is None] == [3, 7, 11, 15, 19, 23]
    rest = {key: value for key, value in GEMMA3_1B.items() if key != "sliding_window_pattern"}
    types = [SLIDING if window else FULL for window in expected.windows]
    assert read(tmp_path, rest, layer_types=types) == expected
    assert read(tmp_path, rest, _sliding_window_pattern=4) == expected


def test_a_context_within_the_window_needs_none(tmp_path: Path) -> None:
    spec = read(tmp_path, GEMMA3_1B, max_model_len=512)
    assert spec.windows == () and [spec.layers[number].rope for number in (0, 5)] == [LOCAL, WHOLE]


def test_ties(tmp_path: Path) -> None:
    assert read(tmp_path, GEMMA3_1B, tie_word_embeddings=False).tied_embeddings is False
    inner = {**GEMMA3_4B["text_config"], "tie_word_embeddings": False}
    assert read(tmp_path, GEMMA3_4B, text_config=inner).tied_embeddings is False
    assert read(tmp_path, GEMMA3_4B, text_config=inner, tie_word_embeddings=True).tied_embeddings is True


def test_logits_may_be_capped(tmp_path: Path) -> None:
    assert read(tmp_path, GEMMA3_1B, final_logit_softcapping=30.0).logit_cap == 30.0


def inner(**changes: Any) -> dict[str, Any]:
    return {**GEMMA3_4B["text_config"], **changes}


@pytest.mark.parametrize(
    ("config", "field", "value", "named"),
    [
        (GEMMA3_1B, "attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        (GEMMA3_1B, "use_bidirectional_attention", True, "use_bidirectional_attention"),
        (GEMMA3_1B, "hidden_activation", "relu", "hidden_activation"),
        (GEMMA3_1B, "hidden_act", "silu", "hidden_act"),
        (GEMMA3_1B, "head_dim", 255, "head_dim"),
        (GEMMA3_1B, "sliding_window", None, "layer_types"),
        (GEMMA3_1B, "sliding_window_pattern", "LLG", "sliding_window_pattern"),
        (GEMMA3_1B, "layer_types", [FULL], "layer_types"),
        (GEMMA3_1B, "rope_local_base_freq", 0.5, "rope_local_base_freq"),
        (GEMMA3_1B, "rope_scaling", {"rope_type": "linear", "factor": 8.0, "beta": 1.0}, "beta"),
        (GEMMA3_1B, "rope_scaling", {FULL: {"rope_type": "linear", "factor": 8.0}}, FULL),
        (GEMMA3_1B, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "rope_parameters"),
        (GEMMA3_1B, "query_pre_attn_scalar", 0, "query_pre_attn_scalar"),
        (GEMMA3_1B, "new_trick", 1, "new_trick"),
        (GEMMA3_4B, "new_trick", 1, "new_trick"),
        (GEMMA3_4B, "text_config", None, "text_config"),
        (GEMMA3_4B, "text_config", inner(model_type="gemma4_text"), "model_type"),
        (GEMMA3_4B, "text_config", inner(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (GEMMA3_4B, "text_config", inner(final_logit_softcapping=30.0), "final_logit_softcapping"),
    ],
)
def test_other_values_are_refused_by_name(
    config: dict[str, Any], field: str, value: Any, named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{named}.* is not supported"):
        read(tmp_path, config, **{field: value})


NEWER_ROPES = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}


@pytest.mark.parametrize("config", [GEMMA3_270M, {**GEMMA3_1B, "rope_parameters": NEWER_ROPES}, GEMMA3_4B])
def test_mutated_configs_are_read_or_refused(config: dict[str, Any], tmp_path: Path) -> None:
    read(tmp_path, config)
    check_mutations(config, tmp_path, read_model_spec, seed=3)


@pytest.mark.parametrize("config", [GEMMA3_1B, GEMMA3_4B])
def test_float16_is_too_narrow(config: dict[str, Any], tmp_path: Path) -> None:
    """Check that files in float16, as GGUF files may be, are computed in bfloat16."""
    spec, gpu = read(tmp_path, config, torch_dtype="float16"), torch.device("cuda")
    assert (spec.dtype, resolve_dtype(spec, "auto", gpu)) == ("float16", torch.bfloat16)
    assert resolve_dtype(spec, "float32", gpu) == torch.float32
    with pytest.raises(ConfigError, match=r"dtype: .* float16"):
        resolve_dtype(spec, "float16", gpu)


@torch.inference_mode()
def test_the_embeddings_multiplier_is_rounded_first(tmp_path: Path) -> None:
    """In bfloat16, the root of 40 is 6.3125, not 6.3246."""
    reference = make_reference("gemma3", hidden_size=40)
    save_reference(reference, tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    assert isinstance(model, Decoder)
    runner, tokens = HandRunner(model), list(range(3, 19))
    row = HandRow(tokens=tokens, table=runner.blocks.table(16), start=0, count=16)
    batch = make_batch([row], 16)
    runner.attention.begin(batch, runner.store)
    _, entering = model.forward_with_states(batch, runner.attention, (0,))
    expected = reference.bfloat16().model.embed_tokens(torch.tensor(tokens))
    assert torch.equal(entering, expected)
