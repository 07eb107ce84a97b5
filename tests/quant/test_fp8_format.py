"""FP8 weights from checkpoints and rounded while they load, against the same model with weights rounded beforehand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.layers.linear import Linear, Split, StackedOutput
from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import DummyWeights
from roseinfer.quant import fp8_stored
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.quant.select import choose_format
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.fp8_files import by_block, by_channel, by_tensor, quantise, widened, write
from tests.helpers.loaded import load, logits
from tests.helpers.weights import BUILD, Imagined, Named, build_for

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BLOCK = Fp8Scheme("block")
CHANNEL = Fp8Scheme("channel")
TENSOR = Fp8Scheme("tensor")


def load_as(folder: Path, scheme: Fp8Scheme) -> CausalLM:
    return load(folder, replace(read_model_spec(folder), quantization=scheme))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_reference(make_reference("llama", hidden_size=256, intermediate_size=384, head_dim=64), tmp_path)


@pytest.mark.parametrize(
    ("scheme", "how"),
    [(BLOCK, by_block), (CHANNEL, by_channel), (TENSOR, by_tensor)],
    ids=["block", "channel", "tensor"],
)
def test_a_checkpoint_in_fp8(folder: Path, scheme: Fp8Scheme, how: Any) -> None:
    scale = "weight_scale_inv" if scheme is BLOCK else "weight_scale"
    narrow, wide = quantise(load_file(folder / "model.safetensors"), scale, how)
    write(folder, wide)
    expected = logits(load(folder))
    write(folder, narrow)
    torch.testing.assert_close(logits(load_as(folder, scheme)), expected)


def test_rounded_while_loading(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    found = logits(load(folder, quantization="fp8"))

    def nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = Fp8Weight.nearest(weight)
        return rounded.codes, rounded.scales[:, None]

    write(folder, quantise(tensors, "weight_scale", nearest)[1])
    torch.testing.assert_close(found, logits(load(folder)))


def test_a_product_of_parts_that_are_not_quantised_alike(folder: Path) -> None:
    narrow, wide = quantise(load_file(folder / "model.safetensors"), "weight_scale", by_channel)
    name = "model.layers.1.self_attn.k_proj.weight"
    mixed = {key: t for key, t in {**narrow, name: wide[name]}.items() if key != f"{name}_scale"}
    write(folder, mixed)
    with pytest.raises(UnsupportedModelError, match=r"1\.self_attn\.q_proj, .*k_proj.* differently quantised"):
        load_as(folder, CHANNEL)


def test_layers_that_stayed_in_floats_are_read_as_such(folder: Path) -> None:
    narrow, wide = quantise(load_file(folder / "model.safetensors"), "weight_scale", by_channel)
    name = "model.layers.1.mlp.down_proj.weight"
    write(folder, {key: t for key, t in {**narrow, name: wide[name]}.items() if key != f"{name}_scale"})
    found = logits(load_as(folder, replace(CHANNEL, ignored=("layers.1.mlp.down_proj",))))
    write(folder, wide)
    torch.testing.assert_close(found, logits(load(folder)))


def test_blocks_are_not_cut() -> None:
    tensors = {f"{name}.weight": torch.randn(rows, 256) for name, rows in (("q", 192), ("k", 128))}
    scheme = Fp8Format(BLOCK, rounds=True, widens=True)
    for names, outs in (("qk", (192, 128)), ("kq", (128, 192))):
        layer = Linear(256, *outs, split=Split.OUTPUTS)
        if names == "kq":
            layer.load(Named(tensors, build_for(Imagined(0, 1), scheme)), *names)
        else:
            with pytest.raises(UnsupportedModelError, match="q: FP8 in blocks of 128 x 128 cannot be cut at 0 and 192"):
                layer.load(Named(tensors, build_for(Imagined(0, 1), scheme)), *names)
    row_parallel = Linear(256, 128, split=Split.INPUTS, unit=64)
    with pytest.raises(UnsupportedModelError, match="cannot be cut at 64 and 128, as tensor_parallel_size"):
        row_parallel.load(Named(tensors, build_for(Imagined(1, 4), scheme)), "k")


def test_ranks_read_their_blocks() -> None:
    weight = torch.randn(512, 256)
    codes, scales = by_block(weight)
    tensors = {"up.weight": codes, "up.weight_scale_inv": scales}
    x, parts = torch.randn(3, 256), []
    for rank in range(2):
        layer = Linear(256, StackedOutput(512, 128), split=Split.OUTPUTS)
        layer.load(Named(tensors, build_for(Imagined(rank, 2), Fp8Format(BLOCK, rounds=False, widens=True))), "up")
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, 1), x @ widened(codes, scales).T)
    down = torch.zeros(3, 512)
    for rank in range(2):
        layer = Linear(256, 512, split=Split.INPUTS, unit=128)
        layer.load(Named(tensors, build_for(Imagined(rank, 2), Fp8Format(BLOCK, rounds=False, widens=True))), "up")
        down += layer(x[:, 128 * rank : 128 * rank + 128])
    torch.testing.assert_close(down, x @ widened(codes, scales).T)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.0.self_attn.q_proj.weight", float("nan"), r"q_proj\.weight holds NaN"),
        ("model.layers.0.mlp.up_proj.weight_scale", float("inf"), r"up_proj\.weight_scale contains an invalid scale"),
        ("model.layers.0.mlp.up_proj.weight_scale", float("nan"), r"up_proj\.weight_scale contains an invalid scale"),
        ("model.layers.0.mlp.up_proj.weight_scale", -1.0, r"up_proj\.weight_scale contains an invalid scale"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 1 << 26], ids=["row by row", "at once"])
def test_nan_is_rejected(
    folder: Path, name: str, value: float, message: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_stored, "MAX_CHECKED_ELEMENTS", at_once)
    narrow, _ = quantise(load_file(folder / "model.safetensors"), "weight_scale", by_channel)
    broken = narrow[name].float()
    broken[3, 0] = value
    write(folder, {**narrow, name: broken.to(narrow[name].dtype)})
    with pytest.raises(UnsupportedModelError, match=message):
        load_as(folder, CHANNEL)


def test_dummy_weights_are_those_of_the_same_seed_rounded() -> None:
    outs, ins = 256, 384
    for scheme in (None, BLOCK):
        build = replace(BUILD, weight_format=choose_format("fp8", scheme, CPU, torch.float32, dummy=True))
        layer = Linear(ins, outs, split=Split.OUTPUTS)
        layer.load(DummyWeights(7, build), "up")
        drawn = torch.empty(outs, ins)
        DummyWeights(7, BUILD).read("up.weight", drawn)
        expected = Fp8Weight.of(drawn, block=scheme is not None).widen(torch.float32)
        assert not torch.equal(expected, drawn)
        torch.testing.assert_close(layer(torch.eye(ins)).T, expected)


@pytest.mark.parametrize(
    ("asked", "stored", "kept"),
    [
        (None, None, None),
        ("fp8", None, "fp8 by channel"),
        (None, TENSOR, "fp8 by channel"),
        ("fp8", BLOCK, "fp8 by block"),
    ],
)
def test_stored_format(
    asked: str | None, stored: Fp8Scheme | None, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_format(asked, stored, GPU, torch.bfloat16).stored_as == kept
    for device, dtype in ((GPU, torch.float32), (CPU, torch.bfloat16)):
        assert choose_format(asked, stored, device, dtype).stored_as == (kept and f"{kept}, widened")


def test_gpus_without_fp8_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    with pytest.raises(ConfigError, match=r"capability 9\.0; NVIDIA L40S has 8\.9"):
        choose_format("fp8", None, GPU, torch.bfloat16)


def test_scales_of_blocks_need_hopper_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    assert isinstance(choose_format(None, CHANNEL, GPU, torch.bfloat16), Fp8Format)
    with pytest.raises(ConfigError, match=r"in blocks need .* 9\.0; NVIDIA B200 has 10\.0"):
        choose_format(None, BLOCK, GPU, torch.bfloat16)
