"""Complete config.json files from the hub: supported ones are read, others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.models.generation import GenerationDefaults, read_generation_config
from roseinfer.models.spec import ExpertsSpec
from tests.helpers.loaded import load

GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
GPT2_MEDIUM = {**GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True}
GPT2_XL = {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}
DISTILGPT2 = {
    **GPT2,
    "_num_labels": 1,
    "n_layer": 6,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
}
LLAMA_1_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_2_7B: dict[str, Any] = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
MISTRAL_7B_V01: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MISTRAL_7B_V03 = {
    **MISTRAL_7B_V01,
    "attention_dropout": 0.0,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32768,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B = {
    **QWEN25_05B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_06B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
QWEN3_CODER_30B_A3B: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
QWEN3_30B_A3B_FP8: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}

# (config, head_dim, KV heads, context, tied, dtype)
# openai/gpt-oss-20b
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}

PUBLISHED = {
    "gpt2": (GPT2, 64, 12, 1024, True, "float32"),
    "gpt2-medium": (GPT2_MEDIUM, 64, 16, 1024, True, "float32"),
    "gpt2-xl": (GPT2_XL, 64, 25, 1024, True, "float32"),
    "distilgpt2": (DISTILGPT2, 64, 12, 1024, True, "float32"),
    "llama-7b": (LLAMA_1_7B, 128, 32, 2048, False, "float16"),
    "Llama-2-7b-hf": (LLAMA_2_7B, 128, 32, 4096, False, "float16"),
    "Llama-3.1-8B": (LLAMA_31_8B, 128, 8, 131072, False, "bfloat16"),
    "SmolLM2-135M": (SMOLLM2_135M, 64, 3, 8192, True, "bfloat16"),
    "Mistral-7B-v0.3": (MISTRAL_7B_V03, 128, 8, 32768, False, "bfloat16"),
    "Qwen2.5-0.5B": (QWEN25_05B, 64, 2, 32768, True, "bfloat16"),
    "Qwen2.5-7B": (QWEN25_7B, 128, 4, 131072, False, "bfloat16"),
    "Qwen3-0.6B": (QWEN3_06B, 128, 8, 40960, True, "bfloat16"),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 128, 4, 40960, False, "bfloat16"),
    "Qwen3-30B-A3B-FP8": (QWEN3_30B_A3B_FP8, 128, 4, 40960, False, "bfloat16"),
    "Qwen3-Coder-30B-A3B-Instruct": (QWEN3_CODER_30B_A3B, 128, 4, 262144, False, "bfloat16"),
    "Mixtral-8x7B-v0.1": (MIXTRAL_8X7B, 128, 8, 32768, False, "bfloat16"),
}


def write(folder: Path, data: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(tmp_path: Path, name: str) -> None:
    config, *expected = PUBLISHED[name]
    spec = read_model_spec(write(tmp_path, config))
    heads = spec.attention[0]
    assert [heads.head_dim, heads.kv_heads, spec.max_position, spec.tied_embeddings, spec.dtype] == expected
    assert spec.qkv_bias == (name.startswith(("gpt2", "distil", "Qwen2")))


def test_published_experts_are_understood(tmp_path: Path) -> None:
    qwen = ExpertsSpec(count=128, top_k=8, width=768, renormalise=True)
    for config in (QWEN3_30B_A3B, QWEN3_CODER_30B_A3B, QWEN3_30B_A3B_FP8):
        spec = read_model_spec(write(tmp_path, config))
        assert (spec.experts, spec.expert_layers, spec.windows) == (qwen, 48, ())
    mixtral = read_model_spec(write(tmp_path, MIXTRAL_8X7B))
    assert mixtral.experts == ExpertsSpec(count=8, top_k=2, width=14336, renormalise=True)


def test_gpt_oss_is_understood(tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path, GPT_OSS_20B))
    experts = ExpertsSpec(count=32, top_k=4, width=2880, renormalise=True, activation="clamped_swish", bias=True)
    assert (spec.experts, spec.expert_layers, spec.windows) == (experts, 24, (128, None) * 12)
    assert spec.quantization is not None and spec.quantization.label == "mxfp4"
    assert all(heads.sinks and heads.qkv_width == 5120 and heads.scale == 0.125 for heads in spec.attention)
    assert (spec.qkv_bias, spec.o_bias, spec.tied_embeddings) == (True, True, False)
    rope = spec.layers[0].rope
    assert rope is not None and (rope.scaling, rope.factor, rope.truncate) == ("yarn", 32.0, False)
    assert rope.magnitude == pytest.approx(1.3466, abs=1e-4) and rope == spec.layers[1].rope


def test_gpt_oss_computes_in_bfloat16_unless_its_config_says_otherwise(tmp_path: Path) -> None:
    assert read_model_spec(write(tmp_path, GPT_OSS_20B)).dtype == "bfloat16"
    for key in ("dtype", "torch_dtype"):
        assert read_model_spec(write(tmp_path, {**GPT_OSS_20B, key: "float32"})).dtype == "float32"


@pytest.mark.parametrize("changes", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}, {"experts_per_token": 5}])
def test_other_experts_of_gpt_oss_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        read_model_spec(write(tmp_path, {**GPT_OSS_20B, **changes}))


def test_mistral_v01_has_a_window(tmp_path: Path) -> None:
    folder = write(tmp_path, MISTRAL_7B_V01)
    spec = read_model_spec(folder)
    assert spec.windows == (4096,) * 32 and spec.max_position == 32768
    assert read_model_spec(folder, max_model_len=4096).windows == ()


def test_rope_scaling_as_transformers_rewrites_it(tmp_path: Path) -> None:
    """Check `rope_type`, which transformers adds to the older `type` from 4.43 on; two different kinds are refused."""
    scaling = {"factor": 4.0, "rope_type": "linear", "type": "linear"}
    spec = read_model_spec(write(tmp_path, {**LLAMA_2_7B, "rope_scaling": scaling}))
    assert spec.layers[0].rope == RopeSpec(theta=10000.0, scaling="linear", factor=4.0)
    with pytest.raises(UnsupportedModelError, match="type = 'yarn'"):
        read_model_spec(write(tmp_path, {**LLAMA_2_7B, "rope_scaling": {**scaling, "type": "yarn"}}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_interleaved", True), ("use_mrope", True), ("is_encoder_decoder", True), ("pruned_heads", {"0": [1]})],
)
def test_relatives_of_harmless_fields_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        read_model_spec(write(tmp_path, {**SMOLLM2_135M, key: value}))


def test_an_index_of_other_than_names_is_refused(tmp_path: Path) -> None:
    spec = read_model_spec(write(tmp_path, SMOLLM2_135M))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": 1}}))
    with pytest.raises(UnsupportedModelError, match="index"):
        load(tmp_path, spec, dtype="auto")


def generation(folder: Path, **fields: Any) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **fields}))
    return read_generation_config(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("temperature", 5.0), ("top_k", 20.0), ("top_p", 0.0), ("top_k", -2)]
)
def test_sampling_defaults_that_no_request_could_use_are_refused(tmp_path: Path, key: str, value: object) -> None:
    """Check that the start fails, not each request that omits the field."""
    with pytest.raises(UnsupportedModelError, match=rf"generation_config\.json: {key} "):
        generation(tmp_path, **{key: value})


def test_spellings_of_an_absent_value(tmp_path: Path) -> None:
    assert generation(tmp_path, top_k=-1, top_p=None, eos_token_id=-1) == GenerationDefaults(top_k=0)
