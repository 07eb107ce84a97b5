"""Scales of K and V in FP8 that a checkpoint may contain, under the names of different tools."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.parallel.group import Share, share_of
from roseinfer.quant.base import WeightSource


class KVScales(NamedTuple):
    """Factors of the codes of a layer's K and V: [kv_heads] float32 each, all finite and positive."""

    key: torch.Tensor
    value: torch.Tensor


def read_kv_scales(source: WeightSource, qkv: Sequence[str], kv_heads: int) -> KVScales | None:
    """Read the scales of this process's share of a layer's `kv_heads`; None if the checkpoint has none.

    qkv: the names of q, k and v, or one name of all three stacked. Raises `UnsupportedModelError` naming a tensor that
    is missing although the other one exists, has a wrong shape, or contains an invalid scale.
    """
    for key, value in _names(qkv):
        if source.stored(key) is not None or source.stored(value) is not None:
            heads = share_of(source.build.group, kv_heads, repeat=True)
            return KVScales(_read(source, key, heads), _read(source, value, heads))
    return None


def _names(qkv: Sequence[str]) -> list[tuple[str, str]]:
    attention = qkv[0].rpartition(".")[0]
    names = [(f"{attention}.k_scale", f"{attention}.v_scale"), (f"{attention}.kv_scale", f"{attention}.kv_scale")]
    if len(qkv) == 3:  # modelopt's
        names.append((f"{qkv[1]}.k_scale", f"{qkv[2]}.v_scale"))
    return names


def _read(source: WeightSource, name: str, heads: Share) -> torch.Tensor:
    """Read one number for all heads, or one for each: [kv_heads], with or without trailing dimensions of 1."""
    held = source.stored(name)
    shape = () if held is None else held.shape
    by_head = shape[:1] == (heads.whole,)
    if prod(shape) != (heads.whole if by_head else 1):
        raise UnsupportedModelError(f"tensor {name} is {list(shape)}, not one scale for all heads or for each")
    parts = [Share(0, width, width) for width in shape]
    if by_head:
        parts[0] = heads
    scales = torch.empty([part.width for part in parts], dtype=torch.float32, device=source.build.device)
    source.read(name, scales, shard=parts)
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise UnsupportedModelError(f"tensor {name} contains an invalid scale: NaN, infinity, or not above zero")
    return scales.view(-1).expand(heads.width).contiguous()
