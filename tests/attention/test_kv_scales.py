"""Scales of K and V, with the names and shapes of different tools."""

import pytest
import torch

from roseinfer.attention.kv_scales import KVScales, read_kv_scales
from roseinfer.core.errors import UnsupportedModelError
from tests.helpers.weights import BUILD, Imagined, Named, build_for

ATTENTION = "model.layers.3.self_attn"
QKV = tuple(f"{ATTENTION}.{name}_proj" for name in "qkv")
HEADS = 4


def read(tensors: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> KVScales | None:
    source = Named({f"{ATTENTION}.{name}": tensor for name, tensor in tensors.items()}, build_for(Imagined(rank, size)))
    found = read_kv_scales(source, QKV, HEADS)
    assert source.asked == source.tensors.keys()
    return found


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")], ids=["compressed", "modelopt"]
)
def test_one_for_all_heads(names: tuple[str, str], shape: tuple[int, ...]) -> None:
    found = read({names[0]: torch.full(shape, 0.5), names[1]: torch.full(shape, 0.25, dtype=torch.bfloat16)})
    assert found is not None
    assert found.key.tolist() == [0.5] * HEADS and found.value.tolist() == [0.25] * HEADS
    assert found.key.dtype is found.value.dtype is torch.float32


def test_one_for_both() -> None:
    found = read({"kv_scale": torch.tensor(0.125)})
    assert found is not None and found.key.tolist() == found.value.tolist() == [0.125] * HEADS


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1)])
@pytest.mark.parametrize(("size", "rank", "held"), [(1, 0, [1, 2, 3, 4]), (2, 1, [3, 4]), (8, 3, [2])])
def test_one_for_each_head(shape: tuple[int, ...], size: int, rank: int, held: list[int]) -> None:
    scales = torch.arange(1.0, 1 + HEADS).view(shape)
    found = read({"k_scale": scales, "v_scale": 2 * scales}, rank, size)
    assert found is not None
    assert found.key.tolist() == held and found.value.tolist() == [2 * scale for scale in held]


def test_none() -> None:
    assert read_kv_scales(Named({}, BUILD), QKV, HEADS) is None
    assert read_kv_scales(Named({}, BUILD), ("h.0.attn.c_attn",), HEADS) is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"k_scale": torch.ones(1)}, r"v_scale is missing"),
        ({"v_scale": torch.ones(1)}, r"k_scale is missing"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, r"k_scale is \[3\], not one scale"),
        ({"k_scale": torch.ones(4, 64), "v_scale": torch.ones(1)}, r"k_scale is \[4, 64\], not one scale"),
        ({"k_scale": torch.ones(0), "v_scale": torch.ones(0)}, r"k_scale is \[0\]"),
        ({"k_scale": torch.ones(1), "v_scale": torch.zeros(1)}, r"v_scale contains an invalid scale"),
        ({"k_scale": torch.tensor(float("nan")), "v_scale": torch.ones(1)}, r"k_scale contains an invalid scale"),
        ({"k_scale": torch.tensor([1.0, 1.0, -1.0, 1.0]), "v_scale": torch.ones(1)}, r"k_scale contains an invalid"),
    ],
)
def test_invalid_scales_are_named(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"{ATTENTION}\.{message}"):
        read(tensors)
