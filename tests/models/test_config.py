import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from roseinfer.core.generation_config import given_document
from roseinfer.models.config import read_model_spec
from roseinfer.models.generation import GenerationDefaults, read_generation_config
from roseinfer.models.spec import ExpertsSpec, ModelSpec, NormSpec, uniform_layers

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "n_ctx": 1024,
    "vocab_size": 50257,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "task_specific_params": {"text-generation": {"do_sample": True}},
    "_name_or_path": "gpt2",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
    "pretraining_tp": 1,
    "use_cache": True,
    "rope_scaling": None,
    "rope_theta": 10000.0,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "sliding_window": 1024,
    "max_window_layers": 2,
    "use_sliding_window": False,
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "layer_types": ["full_attention"] * 3}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
MIXTRAL = {
    **MISTRAL,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "router_jitter_noise": 0.1,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def write(folder: Path, data: dict[str, Any], name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(data))
    return folder


def read(folder: Path, data: dict[str, Any], **changes: Any) -> ModelSpec:
    return read_model_spec(write(folder, {**data, **changes}))


def test_gpt2(tmp_path: Path) -> None:
    assert read(tmp_path, GPT2) == ModelSpec(
        architecture="GPT2LMHeadModel",
        layers=uniform_layers(12, AttentionSpec(heads=12, kv_heads=12, head_dim=64, scale=64**-0.5), None),
        hidden_size=768,
        intermediate_size=3072,
        vocab_size=50257,
        max_position=1024,
        norm=NormSpec(eps=1e-5, kind="layer"),
        activation="gelu_tanh",
        learned_positions=True,
        gated=False,
        tied_embeddings=True,
        dtype="float32",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def test_llama(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA) == ModelSpec(
        architecture="LlamaForCausalLM",
        layers=uniform_layers(
            3, AttentionSpec(heads=8, kv_heads=2, head_dim=8, scale=8**-0.5), RopeSpec(theta=10000.0)
        ),
        hidden_size=64,
        intermediate_size=128,
        vocab_size=1000,
        max_position=4096,
        norm=NormSpec(eps=1e-5),
        activation="silu",
        tied_embeddings=False,
        dtype="bfloat16",
    )


def test_biases_and_head_norms(tmp_path: Path) -> None:
    def options(spec: ModelSpec) -> tuple[bool, bool, bool, bool]:
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm == "head"

    assert options(read(tmp_path, LLAMA, attention_bias=True)) == (True, True, False, False)
    assert options(read(tmp_path, LLAMA, mlp_bias=True)) == (False, False, True, False)
    assert options(read(tmp_path, MISTRAL)) == (False, False, False, False)
    assert options(read(tmp_path, QWEN2)) == (True, False, False, False)
    assert options(read(tmp_path, QWEN3)) == (False, False, False, True)
    assert read(tmp_path, QWEN3).attention[0].head_dim == 32


def test_dtype_is_read_under_both_names(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, torch_dtype=None, dtype="float16").dtype == "float16"
    assert read(tmp_path, LLAMA, torch_dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, RopeSpec(theta=5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.5}},
            RopeSpec(theta=1e4, scaling="linear", factor=2.5),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            RopeSpec(
                theta=5e5,
                scaling="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=8192,
            ),
        ),
        ({"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}, RopeSpec(theta=7e5)),
        (
            {"rope_parameters": {"rope_theta": 7e5, "rope_type": "linear", "factor": 4}},
            RopeSpec(theta=7e5, scaling="linear", factor=4.0),
        ),
    ],
)
def test_rope_in_both_spellings(tmp_path: Path, fields: dict[str, Any], expected: RopeSpec) -> None:
    assert read(tmp_path, LLAMA, **fields).layers[0].rope == expected


REFUSED = [
    (GPT2, "architectures", ["GPT2Model"]),
    (GPT2, "architectures", None),
    (GPT2, "scale_attn_weights", False),
    (GPT2, "scale_attn_by_inverse_layer_idx", True),
    (GPT2, "reorder_and_upcast_attn", True),
    (GPT2, "add_cross_attention", True),
    (GPT2, "activation_function", "relu6"),
    (GPT2, "n_head", 7),
    (GPT2, "n_layer", None),
    (GPT2, "n_layer", "12"),
    (LLAMA, "quantization_config", {"quant_method": "awq"}),
    (LLAMA, "auto_map", {"AutoModelForCausalLM": "custom.Model"}),
    (LLAMA, "logit_scale", 0.25),
    (LLAMA, "sliding_window", 1024),
    (LLAMA, "hidden_act", "xielu"),
    *(
        (LLAMA, key, value)
        for key in ("rms_norm_eps", "rope_theta")
        for value in (math.nan, math.inf, 0, 1e300, 10**400)
    ),
    *((GPT2, "layer_norm_epsilon", value) for value in (math.nan, math.inf)),
    (LLAMA, "rope_theta", 0.5),
    (LLAMA, "rope_scaling", {"rope_type": "linear", "factor": math.inf}),
    (LLAMA, "num_key_value_heads", 3),
    (LLAMA, "head_dim", 7),
    (LLAMA, "torch_dtype", "float8_e4m3fn"),
    (LLAMA, "tie_word_embeddings", "yes"),
    (LLAMA, "rope_scaling", "linear"),
    (LLAMA, "partial_rotary_factor", 0.5),
    (LLAMA, "layer_types", ["full_attention", "linear_attention", "full_attention"]),
    (LLAMA, "layer_types", ["sliding_attention"] * 3),
    (MISTRAL, "sliding_window", -1),
    (MISTRAL, "sliding_window", 0),
    (MISTRAL, "sliding_window", "4096"),
    (QWEN2, "max_window_layers", 1.5),
    (QWEN3, "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    (QWEN3, "layer_types", ["full_attention"]),
]


@pytest.mark.parametrize(("base", "key", "value"), REFUSED, ids=[f"{key}={value}" for _, key, value in REFUSED])
def test_fields_that_change_the_result_are_refused_by_name(
    tmp_path: Path, base: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        read(tmp_path, base, **{key: value})


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "ntk", "factor": 4.0}, "ntk"),
        ({"type": "dynamic", "factor": 4.0}, "dynamic"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": math.nan}, "factor"),
        ({"rope_type": "default", "rope_theta": math.nan}, "rope_theta"),
        ({**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "freq_factor"),
        ({"rope_type": "default", "mrope_section": [16, 24, 24]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ],
)
def test_unknown_rope_is_refused_by_name(tmp_path: Path, scaling: dict[str, Any], named: str) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(UnsupportedModelError, match=named):
            read(tmp_path, LLAMA, **{key: scaling})


def test_unset_unknown_fields_are_harmless(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, new_trick=None, other_trick=False, third={}, fourth=0) == read(tmp_path, LLAMA)


def test_missing_architecture_of_the_llama_kind_names_the_field(tmp_path: Path) -> None:
    broken = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(UnsupportedModelError, match="hidden_size is missing"):
        read(tmp_path, broken)


def test_all_of_mistrals_layers_have_the_window(tmp_path: Path) -> None:
    assert read(tmp_path, MISTRAL).windows == ()
    spec = read(tmp_path, MISTRAL, sliding_window=2048)
    assert spec.windows == (2048,) * spec.num_layers and spec.max_position == 4096
    assert [attention.window for attention in spec.attention] == [2048] * spec.num_layers


def test_mistral_without_the_field_has_the_window_of_its_default(tmp_path: Path) -> None:
    data = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    spec = read(tmp_path, data, max_position_embeddings=8192)
    assert spec.windows == (4096,) * spec.num_layers


def test_mistrals_layers_do_not_differ(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        read(tmp_path, MISTRAL, sliding_window=2048, layer_types=types)


def test_a_window_that_covers_the_context_is_none(tmp_path: Path) -> None:
    folder = write(tmp_path, {**MISTRAL, "sliding_window": 2048})
    assert read_model_spec(folder, max_model_len=2048).windows == ()
    assert read_model_spec(folder, max_model_len=2049).windows == (2048,) * 3
    assert read(tmp_path, MISTRAL, sliding_window=8192).windows == ()


def test_qwens_later_layers_have_the_window_where_it_is_turned_on(tmp_path: Path) -> None:
    config = {**QWEN2, "sliding_window": 512, "max_window_layers": 2}
    assert read(tmp_path, config).windows == ()
    assert read(tmp_path, config, use_sliding_window=True).windows == (None, None, 512)
    assert read(tmp_path, config, use_sliding_window=True, max_window_layers=0).windows == (512,) * 3
    assert read(tmp_path, config, use_sliding_window=True, max_window_layers=3).windows == ()
    assert read(tmp_path, config, use_sliding_window=True, sliding_window=None).windows == ()
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read(tmp_path, config, use_sliding_window=True, layer_types=types).windows == (512, None, 512)


def test_experts_of_qwen3(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_MOE)
    assert spec.experts == ExpertsSpec(count=16, top_k=4, width=48, renormalise=True)
    assert (spec.qk_norm, spec.intermediate_size, spec.expert_layers) == ("head", 128, 3)
    left_out = {key: value for key, value in QWEN3_MOE.items() if key not in ("norm_topk_prob", "decoder_sparse_step")}
    spec = read(tmp_path, left_out)
    assert spec.experts == ExpertsSpec(count=16, top_k=4, width=48, renormalise=False)


def test_the_number_of_experts_under_both_names(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_MOE, num_local_experts=16)
    assert spec.experts is not None and spec.experts.count == 16
    spec = read(tmp_path, QWEN3_MOE, num_experts=None, num_local_experts=12)
    assert spec.experts is not None and spec.experts.count == 12
    with pytest.raises(UnsupportedModelError, match="num_local_experts = 12"):
        read(tmp_path, QWEN3_MOE, num_local_experts=12)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [1]}, (1,)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [2, 0]}, (0, 2)),
        ({"decoder_sparse_step": 3}, (0, 1)),
        ({"mlp_only_layers": None}, ()),
    ],
)
def test_dense_layers_among_those_with_experts(tmp_path: Path, changes: dict[str, Any], dense: tuple[int, ...]) -> None:
    spec = read(tmp_path, QWEN3_MOE, **changes)
    assert spec.experts is not None and spec.experts.dense_layers == dense
    assert spec.expert_layers == 3 - len(dense)


def test_a_model_all_of_whose_layers_are_dense_has_no_experts(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_MOE, decoder_sparse_step=4)
    assert spec.experts is None and spec.expert_layers == 0


def test_experts_of_mixtral(tmp_path: Path) -> None:
    spec = read(tmp_path, MIXTRAL)
    assert spec.experts == ExpertsSpec(count=8, top_k=2, width=128, renormalise=True)
    assert (spec.qk_norm, spec.expert_layers, spec.windows) == (None, 3, ())
    assert read(tmp_path, MIXTRAL, sliding_window=100).windows == (100,) * 3


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (QWEN3_MOE, "num_experts_per_tok", 17),
        (QWEN3_MOE, "num_experts_per_tok", 0),
        (QWEN3_MOE, "num_experts", None),
        (QWEN3_MOE, "moe_intermediate_size", None),
        (QWEN3_MOE, "norm_topk_prob", "yes"),
        (QWEN3_MOE, "decoder_sparse_step", 0),
        (QWEN3_MOE, "mlp_only_layers", [3]),
        (QWEN3_MOE, "mlp_only_layers", [True]),
        (QWEN3_MOE, "shared_expert_intermediate_size", 64),
        (QWEN3_MOE, "scoring_func", "sigmoid"),
        (QWEN3_MOE, "n_group", 2),
        (QWEN3_MOE, "use_qk_norm", False),
        (QWEN3_MOE, "qkv_bias", True),
        (MIXTRAL, "num_local_experts", 1),
        (MIXTRAL, "hidden_act", "tanh"),
    ],
)
def test_fields_that_change_experts_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], field: str, value: Any
) -> None:
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok" if field == "num_local_experts" else field):
        read(tmp_path, config, **{field: value})


@pytest.mark.parametrize("key", ["num_key_value_heads", "rms_norm_eps", "rope_theta"])
def test_missing_fields_of_mixtral_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} is missing"):
        read(tmp_path, MIXTRAL, **{key: None})


def test_all_or_none_of_the_layers_with_experts_have_the_window(tmp_path: Path) -> None:
    turned_on = {"use_sliding_window": True, "sliding_window": 100, "layer_types": None}
    assert read(tmp_path, QWEN3_MOE, **turned_on).windows == (100,) * 3
    assert read(tmp_path, QWEN3_MOE).windows == ()
    types = ["full_attention", "full_attention", "sliding_attention"]
    for config in (QWEN3_MOE, MIXTRAL):
        with pytest.raises(UnsupportedModelError, match="layer_types"):
            read(tmp_path, config, **turned_on | {"layer_types": types})


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        read_model_spec(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match="JSON"):
            read_model_spec(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationDefaults()
    write(tmp_path, {"eos_token_id": 2})
    assert read_generation_config(tmp_path) == GenerationDefaults(eos_token_ids=(2,))
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    write(tmp_path, {"eos_token_id": [7, 2], **values}, "generation_config.json")
    assert read_generation_config(tmp_path) == GenerationDefaults(eos_token_ids=(7, 2))
    write(tmp_path, {"eos_token_id": [7, 5], "do_sample": True, **values}, "generation_config.json")
    assert read_generation_config(tmp_path) == GenerationDefaults(eos_token_ids=(7, 5, 2), **values)
    write(tmp_path, {"eos_token_id": "</s>"}, "generation_config.json")
    with pytest.raises(UnsupportedModelError, match="eos_token_id"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize("choice", ["none", "vllm"])
def test_the_models_sampling_defaults_can_be_left_out(tmp_path: Path, choice: str) -> None:
    write(tmp_path, {"eos_token_id": [7], "do_sample": True, "temperature": 0.6}, "generation_config.json")
    assert read_generation_config(tmp_path, choice) == GenerationDefaults(eos_token_ids=(7,))


def test_another_generation_config_replaces_the_models(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(model, {"eos_token_id": 2})
    write(model, {"eos_token_id": [7], "do_sample": True, "temperature": 0.6, "top_k": 20}, "generation_config.json")
    write(other, {"temperature": 0.5}, "generation_config.json")
    for choice in (other, other / "generation_config.json"):
        found = read_generation_config(model, str(choice))
        assert found == GenerationDefaults(eos_token_ids=(7, 2), temperature=0.5)
    write(other, {"eos_token_id": 5, "do_sample": False, "temperature": 0.5}, "generation_config.json")
    assert read_generation_config(model, str(other)) == GenerationDefaults(eos_token_ids=(5, 2))


def test_an_override_replaces_single_defaults(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(model, {"eos_token_id": [7], "do_sample": True, "temperature": 0.6, "top_k": 20}, "generation_config.json")
    write(other, {"top_p": 0.5, "min_p": 0.1}, "generation_config.json")
    override = '{"temperature": 0.9, "top_k": null, "min_p": 0.2}'
    for choice, rest in (("auto", {}), ("none", {}), (str(other), {"top_p": 0.5})):
        found = read_generation_config(model, choice, override)
        assert found == GenerationDefaults(eos_token_ids=(7,), temperature=0.9, min_p=0.2, **rest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"temperature": 9}', "temperature must be within"),
        ('{"top_p": "x"}', "top_p"),
        ('{"max_new_tokens": 9}', "max_new_tokens is not supported .expected temperature, top_k"),
    ],
)
def test_an_unusable_override_is_refused_before_a_model_is_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^override_generation_config.*{message}") as caught:
        ModelConfig(override_generation_config=text)
    assert str(caught.value).count("override_generation_config") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no file '.*generation_config.json'"),
        ("{", "not JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"temperature": 9}', "generation_config.json: temperature must be within"),
        ('{"top_p": "x"}', "generation_config.json: top_p"),
    ],
)
def test_an_unusable_generation_config_is_an_error_of_the_option(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"^generation_config: .*{message}"):
        given_document(str(tmp_path))


def test_reading_a_config_needs_no_torch() -> None:
    code = "import sys; import roseinfer.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_architecture_is_refused_with_the_most_similar_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(tmp_path, LLAMA, architectures=["LlamaForCasualLM"])
    hint = "similar: LlamaForCausalLM; see docs/reference/support.md for all models"
    assert str(caught.value).endswith(f"architectures = ['LlamaForCasualLM'] is not supported; {hint}")


@pytest.mark.parametrize("names", [None, [], ["DeepseekV3ForCausalLM"], ["x" * 10_000], [[1]], {}])
def test_an_architecture_like_no_other_is_refused_with_the_page_of_models(tmp_path: Path, names: Any) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(tmp_path, LLAMA, architectures=names)
    message = str(caught.value).removeprefix(str(tmp_path))
    assert message.endswith(" is not supported; see docs/reference/support.md for all models") and len(message) < 250
