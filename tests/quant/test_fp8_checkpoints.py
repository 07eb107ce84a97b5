"""Whole checkpoints as tools write them: config.json and tensors, read by the engine, and damaged ones."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer import LLM, SamplingParams
from roseinfer.core.errors import RoseinferError, UnsupportedModelError
from tests.helpers.cases import cases
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.fp8_files import Rounding, Tensors, by_block, by_channel, by_tensor, is_linear, quantise, write
from tests.helpers.held_out import TINY
from tests.helpers.loaded import load, logits
from tests.models.test_quantization import AUTOFP8, COMPRESSED, MODELOPT, MODELOPT_FILE, QWEN3_FP8

KV = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([0.25])}


@dataclass(frozen=True)
class Maker:
    """A tool's way of writing: its entries in config.json or another file, its scales' name, and further tensors.

    beside: of each linear layer. attention: of each layer's attention.
    """

    name: str
    config: dict[str, Any] | None
    scale: str
    rounding: Rounding
    file: dict[str, Any] | None = None
    beside: Tensors = field(default_factory=dict)
    attention: Tensors = field(default_factory=dict)


MAKERS = [
    Maker("qwen", QWEN3_FP8, "weight_scale_inv", by_block),
    Maker("autofp8", AUTOFP8, "weight_scale", by_tensor, beside={"input_scale": torch.tensor(0.1)}, attention=KV),
    Maker("llm-compressor", COMPRESSED, "weight_scale", by_channel),
    Maker("modelopt", MODELOPT, "weight_scale", by_tensor, beside={"input_scale": torch.ones(1)}),
    Maker(
        "modelopt-file",
        None,
        "weight_scale",
        by_tensor,
        MODELOPT_FILE,
        {"input_scale": torch.ones(())},
        {f"{name[0]}_proj.{name}": scale for name, scale in KV.items()},
    ),
]


def make(folder: Path, maker: Maker, family: str = "qwen3", **changes: Any) -> Tensors:
    """Write a checkpoint of that tool to `folder`; return the tensors of the same model in floats."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    save_reference(make_reference(family, **{**sizes, **changes}), folder)
    narrow, wide = quantise(load_file(folder / "model.safetensors"), maker.scale, maker.rounding)
    for name in filter(is_linear, wide):
        narrow |= {f"{name.removesuffix('weight')}{last}": tensor for last, tensor in maker.beside.items()}
    for layer in range(2):
        narrow |= {f"model.layers.{layer}.self_attn.{last}": tensor for last, tensor in maker.attention.items()}
    write(folder, narrow)
    say(folder, maker.config)
    if maker.file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(maker.file))
    return wide


def say(folder: Path, quantization: dict[str, Any] | None) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def in_floats(folder: Path, tensors: Tensors) -> torch.Tensor:
    """Return logits of the same model without quantisation."""
    say(folder, None)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    write(folder, tensors)
    return logits(load(folder))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.name)
def test_a_checkpoint_computes_with_its_codes_and_scales(tmp_path: Path, maker: Maker) -> None:
    wide = make(tmp_path, maker)
    model = load(tmp_path)
    assert [scales is not None for scales in model.kv_scales] == [bool(maker.attention)] * 2
    found = logits(model)
    torch.testing.assert_close(found, in_floats(tmp_path, wide))


@pytest.mark.parametrize("maker", MAKERS[:3], ids=lambda maker: maker.name)
def test_experts_are_widened_and_the_router_is_not_quantised(tmp_path: Path, maker: Maker) -> None:
    wide = make(tmp_path, maker, "qwen3-moe", moe_intermediate_size=256)
    found = logits(load(tmp_path))
    torch.testing.assert_close(found, in_floats(tmp_path, wide))


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.name)
def test_asking_for_the_stored_format_changes_nothing(tmp_path: Path, maker: Maker) -> None:
    make(tmp_path, maker)
    assert torch.equal(logits(load(tmp_path, quantization="fp8")), logits(load(tmp_path)))


def test_an_output_head_in_fp8_is_widened(tmp_path: Path) -> None:
    wide = make(tmp_path, MAKERS[2])
    codes, scales = by_channel(wide["lm_head.weight"])
    narrow = load_file(tmp_path / "model.safetensors")
    write(tmp_path, {**narrow, "lm_head.weight": codes, "lm_head.weight_scale": scales})
    found = logits(load(tmp_path))
    torch.testing.assert_close(found, in_floats(tmp_path, {**wide, "lm_head.weight": codes.float() * scales}))


def test_fp8_may_become_int8(tmp_path: Path) -> None:
    wide = make(tmp_path, MAKERS[0])
    found = logits(load(tmp_path, quantization="int8"))
    say(tmp_path, None)
    write(tmp_path, wide)
    torch.testing.assert_close(found, logits(load(tmp_path, quantization="int8")))


def test_files_in_parts(tmp_path: Path) -> None:
    """A layer's codes are in one file, its scales in another."""
    make(tmp_path, MAKERS[0])
    expected = logits(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name in tensors:
        parts["b.safetensors" if "scale" in name else "a.safetensors"][name] = tensors[name]
    for file, part in parts.items():
        save_file(part, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(logits(load(tmp_path)), expected)


def test_drawn_weights_are_rounded_as_the_config_says(tmp_path: Path) -> None:
    make(tmp_path, MAKERS[0])
    drawn = logits(load(tmp_path, load_format="dummy"))
    say(tmp_path, {**QWEN3_FP8, "modules_to_not_convert": ["model.layers"]})
    exact = logits(load(tmp_path, load_format="dummy"))
    say(tmp_path, None)
    assert torch.equal(logits(load(tmp_path, load_format="dummy")), exact), "all layers were ignored"
    cosine = torch.nn.functional.cosine_similarity(drawn.flatten(), exact.flatten(), 0)
    assert 0.998 < cosine < 1.0


def test_scales_without_a_config_are_not_guessed_at(tmp_path: Path) -> None:
    make(tmp_path, MAKERS[2])
    say(tmp_path, None)
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight has dtype F8_E4M3"):
        load(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight is in FP8, but config\.json does not say so"):
        load(tmp_path, quantization="fp8")


def test_scales_of_another_layout_than_the_config_says(tmp_path: Path) -> None:
    make(tmp_path, MAKERS[2])
    say(tmp_path, {**QWEN3_FP8})
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight_scale is \[256, 1\], config.json says \[2, 2\]"):
        load(tmp_path)


def test_the_engine_rounds_a_model_that_is_asked_for_in_fp8() -> None:
    params = SamplingParams(max_tokens=48, temperature=0.0)
    options = {"num_kv_blocks": 64, "max_num_seqs": 2, "threads": 1, "device": "cpu"}
    with LLM(str(TINY), quantization="fp8", kv_cache_dtype="fp8", **options) as engine:
        assert (engine.engine.info.facts.weights, engine.engine.info.kv_cache) == ("fp8 by channel, widened", "fp8")
        text = engine.generate("def fibonacci(", params)[0].outputs[0].text
    assert "):" in text


# --- damage ---------------------------------------------------------------------------------------------------------
def damage(tensors: Tensors, rng: random.Random) -> Tensors:
    """Remove or duplicate a tensor of the first layer, change its shape or dtype, or write NaN to it."""
    name = rng.choice(sorted(key for key in tensors if "layers.0" in key))
    tensor, rest = tensors[name], {key: t for key, t in tensors.items() if key != name}
    wide = tensor.float().reshape(-1)
    spoilt = wide.clone()
    spoilt[rng.randrange(len(wide))] = rng.choice([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e30])
    kinds = {
        "lost": rest,
        "doubled": {**tensors, f"{name}_scale": tensor.clone(), f"{name}_inv": tensor.clone()},
        "flat": {**rest, name: tensor.reshape(-1)},
        "long": {**rest, name: torch.cat((wide, wide)).to(tensor.dtype)},
        "spoilt": {**rest, name: spoilt.view(tensor.shape).to(tensor.dtype)},
        "wide": {**rest, name: tensor.float()},
        "e5m2": {**rest, name: tensor.float().to(torch.float8_e5m2)},
        "codes": {**rest, name: tensor.float().to(torch.float8_e4m3fn)},
        "int8": {**rest, name: tensor.float().to(torch.int8)},
        "empty": {**rest, name: torch.empty(0)},
    }
    return kinds[rng.choice(sorted(kinds))]


@cases("maker", MAKERS[:2], exhaustive=MAKERS[2:])
def test_damaged_tensors_are_read_or_named(tmp_path: Path, maker: Maker) -> None:
    make(tmp_path, maker, num_hidden_layers=1)
    tensors = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if "layers.1" not in name}
    rng, refused = random.Random(7), 0
    for _ in range(40):
        write(tmp_path, damage(tensors, rng))
        try:
            load(tmp_path)
        except RoseinferError as error:
            assert "layers.0" in str(error)
            refused += 1
    assert refused > 20
