"""Qwen3.5 and its successors: published configs, fields that are refused by name, files, 16 bits, ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from roseinfer.attention.groups import KVGroups
from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.layers import joint_linear
from roseinfer.models.config import read_model_spec
from roseinfer.models.spec import ExpertsSpec, LayerSpec, ModelSpec
from roseinfer.runner.start_notes import start_notes
from roseinfer.state.delta_spec import DeltaSpec
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, reference_logits, save_reference
from tests.helpers.loaded import load as load_checkpoint
from tests.helpers.loaded import load as load_folder
from tests.helpers.loaded import logits
from tests.models.test_hostile_files import check_mutations
from tests.quant.test_fp8_checkpoints import MAKERS, in_floats
from tests.quant.test_fp8_checkpoints import make as make_fp8

LINEAR, FULL = "linear_attention", "full_attention"
TEXT_27B: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [*[LINEAR] * 3, FULL] * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
QWEN3_5_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "text_config": TEXT_27B,
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": {"depth": 27, "model_type": "qwen3_5_vision"},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


TEXT_35B = {
    **{key: value for key, value in TEXT_27B.items() if key not in ("intermediate_size", "mlp_only_layers")},
    "hidden_size": 2048,
    "layer_types": [*[LINEAR] * 3, FULL] * 10,
    "linear_num_value_heads": 32,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5_35B = {
    **QWEN3_5_27B,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": TEXT_35B,
}
QWEN3_NEXT_80B = {
    **{key: value for key, value in TEXT_35B.items() if key not in ("layer_types", "rope_parameters", "dtype")},
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def read(folder: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return read_model_spec(folder)


def test_the_config_of_27b(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_5_27B)
    delta = DeltaSpec(key_heads=16, value_heads=48, key_dim=128, value_dim=128, taps=4)
    attention = AttentionSpec(heads=24, kv_heads=4, head_dim=256, scale=1 / 16)
    full = LayerSpec(attention=attention, rope=RopeSpec(theta=1e7, rotary_dim=64))
    assert spec.layers == (*(LayerSpec(delta=delta),) * 3, full) * 16
    assert spec.attention == (attention,) * 16 and spec.deltas == (delta,) * 48
    assert (spec.norm.offset, spec.qk_norm, spec.output_gate, spec.qkv_bias) == (1.0, "head", True, False)
    assert (spec.dtype, spec.max_position, spec.tied_embeddings) == ("bfloat16", 262144, None)
    assert spec.left_out == ("vision tower", "multi-token prediction head")


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (QWEN3_5_35B, ExpertsSpec(count=256, top_k=8, width=512, renormalise=True, shared_width=512)),
        (QWEN3_NEXT_80B, ExpertsSpec(count=512, top_k=10, width=512, renormalise=True, shared_width=512)),
    ],
    ids=["35b", "next"],
)
def test_configs_with_experts(config: dict[str, Any], experts: ExpertsSpec, tmp_path: Path) -> None:
    spec = read(tmp_path, config)
    delta = DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
    assert spec.experts == experts and set(spec.deltas) == {delta}
    assert [layer.attention is None for layer in spec.layers] == [True, True, True, False] * (spec.num_layers // 4)
    assert spec.layers[3].rope == RopeSpec(theta=1e7, rotary_dim=64) and spec.layers[3].head_dim == 256


def test_bytes_of_a_state_of_27b(tmp_path: Path) -> None:
    """The published size is 146.8 MiB with three inputs of the convolution; here are four."""
    spec = read(tmp_path, QWEN3_5_27B)
    assert spec.state_bytes("bfloat16") == 48 * (48 * 128 * 128 * 4 + 10240 * 4 * 2)


@pytest.mark.parametrize("left", ["layer_types", "rope_parameters", "attn_output_gate", "linear_num_key_heads"])
def test_defaults(left: str, tmp_path: Path) -> None:
    """transformers' own defaults mean the same; without parameters the rotation has another theta."""
    text = {key: value for key, value in TEXT_27B.items() if key != left}
    expected, spec = read(tmp_path, QWEN3_5_27B), read(tmp_path, QWEN3_5_27B, text_config=text)
    if left != "rope_parameters":
        assert spec == expected
    else:
        assert {layer.rope for layer in spec.layers} == {None, RopeSpec(theta=1e4, rotary_dim=64)}


def test_a_config_may_say_that_only_the_language_model_counts(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3_5_27B, language_model_only=True) == read(tmp_path, QWEN3_5_27B)


def test_transformers_spelling_means_the_same(tmp_path: Path) -> None:
    expected = read(tmp_path, QWEN3_5_27B)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert read_model_spec(tmp_path) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_output_gate", False),
        ("mamba_ssm_dtype", "bfloat16"),
        ("layer_types", [LINEAR] * 64),
        ("layer_types", ["sliding_attention"] * 64),
        ("linear_num_value_heads", 40),
        ("linear_key_head_dim", 0),
        ("hidden_act", "tanh"),
        ("hidden_act", "gelu"),
        ("output_gate_type", "sigmoid"),
        ("use_flash_linear_attention_2", True),
        ("model_type", "qwen9_text"),
    ],
)
def test_what_would_change_the_result_is_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        read(tmp_path, QWEN3_5_27B, text_config={**TEXT_27B, field: value})


def test_weights_of_experts_are_always_divided_by_their_sum(tmp_path: Path) -> None:
    stated = {**TEXT_35B, "norm_topk_prob": True}
    assert read(tmp_path, QWEN3_5_35B, text_config=stated) == read(tmp_path, QWEN3_5_35B)
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob"):
        read(tmp_path, QWEN3_5_35B, text_config={**stated, "norm_topk_prob": False})


@pytest.mark.parametrize("config", [QWEN3_5_27B, QWEN3_5_35B, QWEN3_NEXT_80B], ids=["27b", "35b", "next"])
def test_mutated_configs_are_read_or_refused(config: dict[str, Any], tmp_path: Path) -> None:
    check_mutations(config, tmp_path, read_model_spec, seed=3)


def load(folder: Path, dtype: str = "float32") -> HandRunner:
    spec, device = read_model_spec(folder), torch.device("cpu")
    return HandRunner(load_checkpoint(folder, spec, dtype=dtype, device=device))


def run(runner: HandRunner, tokens: list[int], counts: list[int]) -> torch.Tensor:
    table, start, found = runner.blocks.table(len(tokens)), 0, []
    for count in counts:
        found += runner.run([HandRow(tokens=tokens, table=table, start=start, count=count)])
        start += count
    return torch.cat(found)


TOKENS = list(range(2, 52))


@pytest.mark.parametrize("counts", [[50], [5] * 10, [47, 1, 1, 1]])
def test_a_checkpoint_with_vision_tower_and_draft_head(counts: list[int], tmp_path: Path) -> None:
    reference = make_reference("qwen3.5-vision")
    save_reference(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(".visual." in name for name in tensors) and "model.language_model.embed_tokens.weight" in tensors
    tensors |= {"mtp.fc.weight": torch.randn(8, 16), "mtp.layers.0.self_attn.q_norm.weight": torch.randn(8)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = run(load(tmp_path), TOKENS, counts)
    # Rounding in float32 differs between CPUs: 1.5e-4 on one.
    torch.testing.assert_close(found, reference_logits(reference, TOKENS), rtol=0, atol=5e-4)


def test_stacked_experts(tmp_path: Path) -> None:
    """Published checkpoints stack the experts' matrices, which transformers takes apart when it saves."""
    reference = make_reference("qwen3.5-moe")
    save_reference(reference, tmp_path)
    expected = run(load(tmp_path), TOKENS, [50])
    apart = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor for name, tensor in apart.items() if ".experts." not in name}
    stacked = {name: tensor for name, tensor in reference.state_dict().items() if ".experts." in name}
    assert {name.rpartition(".")[2] for name in stacked} == {"gate_up_proj", "down_proj"}
    save_file(tensors | stacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(run(load(tmp_path), TOKENS, [50]), expected)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_all_projections_of_linear_attention_in_one_product(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they are, if all of them are floats."""
    save_reference(make_reference(name), tmp_path)
    expected = run(load(tmp_path), TOKENS, [47, 1, 2])
    monkeypatch.setattr(joint_linear, "has_triton", lambda device: True)
    torch.testing.assert_close(run(load(tmp_path), TOKENS, [47, 1, 2]), expected, rtol=1e-4, atol=1e-4)


WIDE = {"head_dim": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64}


@pytest.mark.parametrize("experts", [{}, {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 128}])
def test_fp8_in_blocks(experts: dict[str, int], tmp_path: Path) -> None:
    """All large matrices of linear attention and of experts are codes; the gates are not."""
    wide = make_fp8(tmp_path, MAKERS[0], "qwen3.5-moe" if experts else "qwen3.5", **WIDE, **experts)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv" in names
    assert not any("in_proj_a.weight_scale" in name or "expert_gate.weight_scale" in name for name in names)
    found = logits(load_folder(tmp_path))
    torch.testing.assert_close(found, in_floats(tmp_path, wide))


def test_half_precision(tmp_path: Path) -> None:
    reference = make_reference("qwen3.5")
    found = run(load(save_reference(reference, tmp_path), "bfloat16"), TOKENS, [30, 19, 1])
    expected = reference_logits(reference, TOKENS)
    assert (found - expected).square().mean(1).sqrt().median() / expected.std() < 0.05


def test_an_unknown_tensor_is_an_error(tmp_path: Path) -> None:
    save_reference(make_reference("qwen3.5"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.linear_attn.bias"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="unexpected tensor"):
        load(tmp_path)


def test_drawn_weights(tmp_path: Path) -> None:
    save_reference(make_reference("qwen3.5"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    spec, device = read_model_spec(tmp_path), torch.device("cpu")
    model = load_checkpoint(tmp_path, spec, device=device, load_format="dummy")
    assert run(HandRunner(model), TOKENS, [40, 10]).isfinite().all()


def test_the_start_names_what_is_left_out(tmp_path: Path) -> None:
    assert list(start_notes(read(tmp_path, QWEN3_5_27B), 1000, KVGroups.single(16), [9])) == [
        "the checkpoint's vision tower is left out: requests with images are rejected",
        "the checkpoint's multi-token prediction head is left out",
    ]
