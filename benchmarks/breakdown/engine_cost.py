"""Bytes and operations of a running engine's step, from the engine's description."""

import torch

from benchmarks.model_cost import ModelCost
from roseinfer.engine.api import EngineInfo
from roseinfer.models.spec import ModelSpec

_FP8, _INT8, _WIDENED = "fp8", "int8", "widened"


def engine_cost(spec: ModelSpec, info: EngineInfo) -> ModelCost:
    """Return the cost of the model of `spec` as the engine stores it: weights and K/V in at least 16 bits, or in 8.

    Only int8 stores the head in one byte. Layers that a checkpoint keeps in 16 bits beside FP8 count as FP8. Raise like
    `ModelCost.of`.
    """
    itemsize = _itemsize(info.facts.dtype)
    narrow = info.facts.weights.startswith((_FP8, _INT8)) and not info.facts.weights.endswith(_WIDENED)
    return ModelCost.of(
        spec,
        itemsize,
        layer_itemsize=1 if narrow else _itemsize(info.facts.dtype),
        kv_itemsize=1 if info.kv_cache.startswith(_FP8) else _itemsize(info.kv_cache),
        head_itemsize=1 if info.facts.weights.startswith(_INT8) else itemsize,
    )


def _itemsize(name: str) -> int:
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize
