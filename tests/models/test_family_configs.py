"""Configs of families, as the hub has them: both spellings give the same spec, and other values are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.attention.rope_spec import QueryScale, RopeSpec
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.models.documents import text_fields
from roseinfer.models.generation import read_generation_config
from roseinfer.models.spec import ModelSpec

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
    "vocab_size": 1000,
}
ERNIE = {
    **BASE,
    "architectures": ["Ernie4_5ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "model_type": "ernie4_5",
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
HUNYUAN = {
    **BASE,
    "add_classification_head": False,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_head_dim": 32,
    "cla_share_factor": 2,
    "dense_list": [4096, 0],
    "eod_token_id": 127967,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "org_vocab_size": 128167,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
}
COHERE2 = {
    **BASE,
    "architectures": ["Cohere2ForCausalLM"],
    "cache_implementation": "hybrid",
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "model_type": "cohere2",
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 4,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
STARCODER2 = {
    **BASE,
    "architectures": ["Starcoder2ForCausalLM"],
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_epsilon": 1e-05,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "residual_dropout": 0.1,
    "rope_theta": 1000000,
    "sliding_window": 1024,
    "use_bias": True,
}
MINISTRAL = {
    **BASE,
    "architectures": ["MinistralForCausalLM"],
    "head_dim": 32,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"] * 2,
    "model_type": "ministral",
    "rope_theta": 1000000.0,
    "sliding_window": 1024,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "rope_type": "yarn",
    "type": "yarn",
}
MINISTRAL3 = {
    **BASE,
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 32,
    "model_type": "ministral3",
    "rope_scaling": YARN,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {**MINISTRAL3, "architectures": None, "torch_dtype": None},
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}


def read(folder: Path, data: dict[str, Any], **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**data, **changes}))
    return read_model_spec(folder)


@pytest.mark.parametrize("config", [ERNIE, HUNYUAN, COHERE2, STARCODER2, MINISTRAL, MINISTRAL3])
def test_both_spellings_of_rotary_positions(config: dict[str, Any], tmp_path: Path) -> None:
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    newer = {"rope_parameters": {**scaling, "rope_theta": config["rope_theta"]}}
    older = read(tmp_path, config)
    kept = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    assert read(tmp_path, kept, **newer) == older
    # A default would hide that the field is not read.
    assert older.layers[0].rope is None or older.layers[0].rope.theta == config["rope_theta"]


def test_ernie_has_defaults_of_its_own(tmp_path: Path) -> None:
    absent = ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "rms_norm_eps", "use_bias")
    spec = read(tmp_path, {key: value for key, value in ERNIE.items() if key not in absent})
    assert spec == read(tmp_path, ERNIE)
    assert spec.layers[0].rope == RopeSpec(theta=500000.0, interleaved=True)
    assert read(tmp_path, ERNIE, use_bias=True).mlp_bias
    assert read(tmp_path, ERNIE, head_dim=None).attention[0].head_dim == 16


def test_hunyuan_has_a_larger_base(tmp_path: Path) -> None:
    spec = read(tmp_path, HUNYUAN)
    assert spec.layers[0].rope == RopeSpec(theta=10000.0, scaling="ntk_alpha", factor=1000.0)
    assert spec.attention[0].head_dim == 32
    assert spec.qk_norm == "head_after_rotation"


def test_cohere2_rotates_only_in_windows(tmp_path: Path) -> None:
    spec = read(tmp_path, COHERE2)
    assert spec.windows == (1024, 1024, 1024, None) * 2
    assert [layer.rope is None for layer in spec.layers] == [False, False, False, True] * 2
    assert spec.parallel and not spec.norm.bias and spec.tied_embeddings and spec.logit_multiplier == 0.25
    types = ["sliding_attention" if window else "full_attention" for window in spec.windows]
    assert read(tmp_path, COHERE2, sliding_window_pattern=None, layer_types=types) == spec


def test_cohere2_rotates_the_same_layers_if_the_window_covers_the_context(tmp_path: Path) -> None:
    spec = read(tmp_path, COHERE2, sliding_window=4096)
    assert spec.windows == ()
    assert [layer.rope is None for layer in spec.layers] == [False, False, False, True] * 2


def test_ministral_has_windows_in_the_layers_that_are_listed(tmp_path: Path) -> None:
    assert read(tmp_path, MINISTRAL).windows == (None, 1024, 1024, 1024) * 2
    assert read(tmp_path, MINISTRAL, layer_types=None).windows == (1024,) * 8


def test_ministral3_scales_queries_by_position(tmp_path: Path) -> None:
    rope = read(tmp_path, MINISTRAL3).layers[0].rope
    assert rope is not None and rope.magnitude == 1.0
    assert rope.query_scale == QueryScale(beta=0.1, original_max_position=256)
    # The default of transformers, for a config with neither spelling.
    rope = read(tmp_path, MINISTRAL3, rope_scaling=None).layers[0].rope
    assert rope is not None and (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 16.0, 16384.0)


REFUSED = [
    (ERNIE, "compression_ratio", 2.0),
    (ERNIE, "rope_scaling", {"type": "dynamic", "alpha": 2.0}),
    (HUNYUAN, "use_cla", True),
    (HUNYUAN, "use_qk_norm", False),
    (HUNYUAN, "head_dim", 16),
    (HUNYUAN, "rope_scaling", {"type": "dynamic", "factor": 2.0}),
    (COHERE2, "use_parallel_block", False),
    (COHERE2, "use_qk_norm", True),
    (COHERE2, "sliding_window", None),
    (COHERE2, "layer_switch", 2),
    (STARCODER2, "mlp_type", "gated"),
    (STARCODER2, "norm_type", "rms_norm"),
    (MINISTRAL, "layer_types", ["chunked_attention"] * 8),
    (MINISTRAL3, "layer_types", ["full_attention", "sliding_attention"] * 4),
    (MINISTRAL3, "rope_scaling", {**YARN, "alpha": 2.0}),
    (MISTRAL3, "text_config", None),
    (MISTRAL3, "text_config", {**MISTRAL3["text_config"], "model_type": "qwen3"}),
    (MISTRAL3, "text_config", {**MISTRAL3["text_config"], "logit_scale": 2.0}),
    (MISTRAL3, "logit_scale", 2.0),
]


@pytest.mark.parametrize(("config", "field", "value"), REFUSED)
def test_other_values_are_refused_by_name(config: dict[str, Any], field: str, value: Any, tmp_path: Path) -> None:
    read(tmp_path, config)
    with pytest.raises(UnsupportedModelError, match=f"{field}|layer_types|attention_head_dim"):
        read(tmp_path, config, **{field: value})


def test_a_text_model_within_a_config(tmp_path: Path) -> None:
    spec, alone = read(tmp_path, MISTRAL3), read(tmp_path, MINISTRAL3)
    assert spec.layers == alone.layers
    assert (spec.architecture, spec.dtype) == ("Mistral3ForConditionalGeneration", "bfloat16")
    assert spec.left_out == ("vision tower",)
    plain = {**BASE, "model_type": "mistral", "head_dim": 32, "sliding_window": None}
    assert read(tmp_path, MISTRAL3, text_config=plain).layers[0].rope == RopeSpec(theta=10000.0)


def test_the_text_model_names_the_end_of_answers(tmp_path: Path) -> None:
    read(tmp_path, MISTRAL3, text_config={**MISTRAL3["text_config"], "eos_token_id": 2})
    assert read_generation_config(tmp_path).eos_token_ids == (2,)
    assert text_fields({"vocab_size": 5, "text_config": {"vocab_size": 7}})["vocab_size"] == 7
