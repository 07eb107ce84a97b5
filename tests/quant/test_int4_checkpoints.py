"""Whole checkpoints with weights in four bits, read by the engine; products in four bits by a reference."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from roseinfer.core.errors import RoseinferError, UnsupportedModelError
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.layers.linear import Linear, Split
from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import Checkpoint
from roseinfer.quant.int4_format import CudaProducts, Int4Format
from roseinfer.quant.int4_scheme import Int4Scheme
from roseinfer.quant.int4_stored import Int4Source
from tests.helpers.cases import cases, each_value
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.fp8_files import is_linear
from tests.helpers.gathering import Gathering
from tests.helpers.int4_files import (
    AWQ,
    DISORDERED,
    GPTQ,
    MAKERS,
    Int4Maker,
    Tensors,
    gptq_v2,
    pack_quantized,
    packed_config,
    quantise_folder,
    quantise_int4,
    state_quantization,
    write_tensors,
)
from tests.helpers.loaded import load, logits
from tests.helpers.weights import Imagined, build_for

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def load_widened(folder: Path, **more: Any) -> CausalLM:
    return load(folder, quantization="floats", **more)


def make(folder: Path, maker: Int4Maker, family: str = "qwen3", **changes: Any) -> Tensors:
    """Write a checkpoint of that tool to `folder`; return the tensors of the same model in floats."""
    save_reference(make_reference(family, **{**SIZES, **changes}), folder)
    return quantise_folder(folder, maker)


def in_floats(folder: Path, tensors: Tensors, **more: Any) -> torch.Tensor:
    """Return logits of the same model without quantisation."""
    state_quantization(folder, None)
    write_tensors(folder, tensors)
    return logits(load(folder, **more))


def format_of(folder: Path, product: Gathering) -> Int4Format:
    scheme = read_model_spec(folder).quantization
    assert isinstance(scheme, Int4Scheme)
    return Int4Format(scheme, product)


@each_value(maker={maker.name: maker for maker in (*MAKERS, *DISORDERED)}, family=["qwen3", "qwen2"])
def test_a_checkpoint_computes_with_its_codes(tmp_path: Path, maker: Int4Maker, family: str) -> None:
    """Compare widened weights, and products in four bits, with the model in floats."""
    wide = make(tmp_path, maker, family)
    model, product = load_widened(tmp_path), Gathering()
    assert model.weights == f"int4 in groups of {maker.group}, widened"
    found, kept = logits(model), load_widened(tmp_path, weight_format=format_of(tmp_path, product))
    assert kept.weights == f"int4 in groups of {maker.group}" and product.made == 8
    # Of each layer, the products of q, k and v, of o, and of gate and up. That of down is sorted as it wants.
    assert product.gathers == (6 if maker in DISORDERED else 0)
    expected = in_floats(tmp_path, wide)
    assert torch.equal(found, expected)
    torch.testing.assert_close(logits(kept), expected)


@pytest.mark.parametrize(
    ("family", "changes"), [("llama-bias", {}), ("smollm3", {"num_hidden_layers": 2}), ("phi3", {})]
)
def test_outputs_are_sorted_for_the_next_layer(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Check biases of gate and up, and matrices that the checkpoint stacks."""
    save_reference(make_reference(family, **{**SIZES, **changes}), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name: name.replace("qkv_proj", "q_proj").replace("gate_up_proj", "gate_proj") for name in tensors}
    narrow, wide = quantise_int4({renamed[name]: tensor for name, tensor in tensors.items()}, DISORDERED[1])
    if family == "phi3":
        narrow, wide = (_as_phi3(some) for some in (narrow, wide))
    write_tensors(tmp_path, narrow)
    state_quantization(tmp_path, DISORDERED[1].config)
    product = Gathering()
    found = logits(load_widened(tmp_path, weight_format=format_of(tmp_path, product)))
    assert (product.made, product.gathers) == (8, 6)
    torch.testing.assert_close(found, in_floats(tmp_path, wide))


def test_a_layer_with_more_columns_than_outputs_before_it_is_refused(tmp_path: Path) -> None:
    make(tmp_path, DISORDERED[1])
    tensors = load_file(tmp_path / "model.safetensors")
    wider, _ = quantise_int4({"model.layers.0.mlp.down_proj.weight": torch.randn(128, 256)}, DISORDERED[1])
    write_tensors(tmp_path, tensors | wider)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.down_proj"):
        load_widened(tmp_path, weight_format=format_of(tmp_path, Gathering()))


def _as_phi3(tensors: Tensors) -> Tensors:
    return {
        name.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj"): tensor
        for name, tensor in tensors.items()
    }


def test_layers_may_stay_floats(tmp_path: Path) -> None:
    """Check a checkpoint whose first block and whose output head are floats, or in four bits."""
    reference = save_reference(make_reference("qwen3", **SIZES), tmp_path)
    tensors = load_file(reference / "model.safetensors")
    narrow, wide = quantise_int4(tensors, MAKERS[0])
    narrow = {name: tensor for name, tensor in narrow.items() if "layers.0" not in name}
    narrow |= {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
    wide = {name: tensors[name] if "layers.0" in name else tensor for name, tensor in wide.items()}
    write_tensors(tmp_path, narrow)
    state_quantization(tmp_path, {**AWQ, "modules_to_not_convert": ["layers.0", "lm_head"]})
    product = Gathering()
    found = logits(load_widened(tmp_path, weight_format=format_of(tmp_path, product)))
    assert product.made == 4
    torch.testing.assert_close(found, in_floats(tmp_path, wide))


def test_an_output_head_in_four_bits_is_widened(tmp_path: Path) -> None:
    wide = make(tmp_path, MAKERS[1], vocab_size=96)
    narrow = load_file(tmp_path / "model.safetensors")
    head = {"model.q_proj.weight": narrow.pop("lm_head.weight")}
    packed, floats = quantise_int4(head, MAKERS[1])
    write_tensors(tmp_path, narrow | {name.replace("model.q_proj", "lm_head"): t for name, t in packed.items()})
    state_quantization(tmp_path, {**MAKERS[1].config, "lm_head": True})
    found = logits(load_widened(tmp_path))
    assert torch.equal(found, in_floats(tmp_path, {**wide, "lm_head.weight": floats["model.q_proj.weight"]}))


def test_experts_are_widened(tmp_path: Path) -> None:
    wide = make(tmp_path, MAKERS[0], "qwen3-moe", moe_intermediate_size=64)
    product = Gathering()
    found = logits(load_widened(tmp_path, weight_format=format_of(tmp_path, product)))
    assert product.made == 4
    torch.testing.assert_close(found, in_floats(tmp_path, wide))


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_four_bits_may_become_eight(tmp_path: Path, quantization: str | None) -> None:
    """A CPU rounds them to int8 unless an option says otherwise."""
    wide = make(tmp_path, MAKERS[0])
    model = load(tmp_path, quantization=quantization)
    assert quantization == "fp8" or (model.weights or "").startswith("int8")
    assert torch.equal(logits(model), in_floats(tmp_path, wide, quantization=quantization or "int8"))


def test_groups_that_differ_by_layer(tmp_path: Path) -> None:
    """Check GPTQ's rules: down is in larger groups, o is not quantised."""
    reference = save_reference(make_reference("qwen3", **SIZES), tmp_path)
    tensors = load_file(reference / "model.safetensors")
    small, wide = quantise_int4(tensors, MAKERS[2])
    large, wide_down = quantise_int4(tensors, Int4Maker("v2", {}, gptq_v2, 64))
    narrow: Tensors = {}
    for name in {*small, *tensors}:
        layer = name.rpartition(".")[0]
        source = large if layer.endswith("down_proj") else tensors if layer.endswith("o_proj") else small
        narrow |= {name: source[name]} if name in source else {}
    for name in filter(is_linear, wide):
        wide[name] = wide_down[name] if "down_proj" in name else tensors[name] if "o_proj" in name else wide[name]
    write_tensors(tmp_path, narrow)
    rules = {r"-:.*\.o_proj": {}, r"+:.*\.down_proj": {"bits": 4, "group_size": 64, "desc_act": False}}
    state_quantization(tmp_path, {**GPTQ, "checkpoint_format": "gptq_v2", "dynamic": rules})
    assert torch.equal(logits(load_widened(tmp_path)), in_floats(tmp_path, wide))


def test_biases_of_zeros_that_a_tool_added_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, MAKERS[1])
    expected, narrow = logits(load_widened(tmp_path)), load_file(tmp_path / "model.safetensors")
    bias = "model.layers.1.mlp.up_proj.bias"
    write_tensors(tmp_path, narrow | {bias: torch.zeros(192, dtype=torch.float16)})
    assert torch.equal(logits(load_widened(tmp_path)), expected)
    write_tensors(tmp_path, narrow | {bias: torch.full((192,), 0.5)})
    with pytest.raises(UnsupportedModelError, match=rf"tensor {bias} is not zero, but the model has no such bias"):
        load_widened(tmp_path)
    write_tensors(tmp_path, narrow | {"model.layers.1.input_layernorm.bias": torch.zeros(128)})
    with pytest.raises(UnsupportedModelError, match="unexpected tensor"):
        load_widened(tmp_path)


@pytest.mark.parametrize("maker", [*MAKERS, DISORDERED[1]], ids=lambda maker: maker.name)
def test_ranks_hold_parts_of_the_whole(tmp_path: Path, maker: Int4Maker) -> None:
    """Two ranks' outputs side by side, and sums of products by their halves of the inputs, are those of the whole."""
    wide = make(tmp_path, maker, intermediate_size=256)
    scheme = read_model_spec(tmp_path).quantization
    assert isinstance(scheme, Int4Scheme)
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    x, h = torch.randn(3, 128), torch.randn(3, 256)
    columns, total = [], torch.zeros(3, 128)
    for rank in range(2):
        with Checkpoint(tmp_path, build_for(Imagined(rank, 2), Int4Format(scheme, Gathering()))) as checkpoint:
            source = Int4Source(checkpoint, scheme)
            layer = Linear(128, 256, split=Split.OUTPUTS)
            layer.load(source, up, feeds=down)
            columns.append(layer(x))
            if maker not in DISORDERED:
                layer = Linear(256, 128, split=Split.INPUTS)
                layer.load(source, down)
                total += layer(h[:, 128 * rank : 128 * rank + 128])
            else:
                with pytest.raises(UnsupportedModelError, match=r"down_proj\.g_idx.* as tensor_parallel_size asks for"):
                    Linear(256, 128, split=Split.INPUTS).load(source, down)
    torch.testing.assert_close(torch.cat(columns, 1), F.linear(x, wide[f"{up}.weight"]))
    if maker not in DISORDERED:
        torch.testing.assert_close(total, F.linear(h, wide[f"{down}.weight"]), rtol=1e-4, atol=1e-5)


def test_tensors_of_another_group_size_than_the_config_says(tmp_path: Path) -> None:
    make(tmp_path, MAKERS[0])
    state_quantization(tmp_path, {**AWQ, "group_size": 64})
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.qzeros is \[4, 16\], config\.json says \[2, 16\]"):
        load_widened(tmp_path)
    state_quantization(tmp_path, None)
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight is missing"):
        load_widened(tmp_path)


def test_scales_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    make(tmp_path, MAKERS[3])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight_scale"
    for value in (float("nan"), float("inf")):
        tensors[name][3, 1] = value
        write_tensors(tmp_path, tensors)
        with pytest.raises(UnsupportedModelError, match=rf"{name} holds NaN, infinity"):
            load_widened(tmp_path)


def damage(tensors: Tensors, rng: random.Random) -> Tensors:
    """Remove or duplicate a tensor, or change its shape or dtype."""
    name = rng.choice(sorted(tensors))
    tensor, rest = tensors[name], {key: t for key, t in tensors.items() if key != name}
    kinds = {
        "lost": rest,
        "doubled": {**tensors, f"{name}_2": tensor.clone()},
        "flat": {**rest, name: tensor.reshape(-1)},
        "long": {**rest, name: torch.cat((tensor, tensor))},
        "turned": {**rest, name: tensor.T if tensor.ndim == 2 else tensor.reshape(-1)[:-1]},
        "wide": {**rest, name: tensor.to(torch.float64)},
        "int8": {**rest, name: tensor.to(torch.int8)},
        "empty": {**rest, name: torch.empty(0)},
    }
    return kinds[rng.choice(sorted(kinds))]


@cases("maker", [DISORDERED[0]], exhaustive=[MAKERS[0], MAKERS[4]])
def test_damaged_tensors_are_read_or_named(tmp_path: Path, maker: Int4Maker) -> None:
    make(tmp_path, maker, num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {name: t for name, t in tensors.items() if "layers.0" in name}
    rng, refused = random.Random(7), 0
    for _ in range(40):
        write_tensors(tmp_path, {**{name: t for name, t in tensors.items() if name not in layer}, **damage(layer, rng)})
        try:
            load_widened(tmp_path)
        except RoseinferError as error:
            assert "layers.0" in str(error)
            refused += 1
    assert refused > 25


def test_a_scale_for_each_row(tmp_path: Path) -> None:
    config = packed_config(strategy="channel", group_size=None)
    wide = make(tmp_path, Int4Maker("packed", config, pack_quantized, None, {"symmetric": True}))
    model = load_widened(tmp_path)
    assert model.weights == "int4 by channel, widened"
    assert torch.equal(logits(model), in_floats(tmp_path, wide))


def test_weights_beyond_float16_are_refused_by_name(tmp_path: Path) -> None:
    """A file in bfloat16 may hold scales that float16 does not; a model in another dtype can have them."""
    maker = MAKERS[3]
    make(tmp_path, maker)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.1.mlp.up_proj"
    tensors[f"{layer}.weight_scale"][3, 1] = 6e4
    write_tensors(tmp_path, tensors)
    assert load_widened(tmp_path, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match=rf"{tmp_path}: tensor {layer}\.weight holds .* beyond float16"):
        load_widened(tmp_path, dtype="float16")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_a_layer_that_kernels_do_not_take_is_named(tmp_path: Path) -> None:
    make(tmp_path, MAKERS[3])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"][3, 1] = 6e4
    write_tensors(tmp_path, tensors)
    scheme = read_model_spec(tmp_path).quantization
    assert isinstance(scheme, Int4Scheme)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.gate_proj, .*up_proj: .* the range of float16"):
        load_widened(tmp_path, weight_format=Int4Format(scheme, CudaProducts()))
