"""Bytes and operations of a running engine's step, from the engine's description."""

import torch

from benchmarks.gpu_rows import MXFP4_BYTES
from benchmarks.model_cost import ModelCost
from roseinfer.engine.api import EngineInfo
from roseinfer.models.spec import ModelSpec

_FP8, _INT8, _MXFP4, _WIDENED = "fp8", "int8", "mxfp4", "widened"


def engine_cost(spec: ModelSpec, info: EngineInfo) -> ModelCost:
    """Return the cost of the model of `spec` as the engine stores it: weights and K/V in at least 16 bits, or in 8, and
    experts also in MXFP4.

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
        expert_itemsize=MXFP4_BYTES if info.facts.weights == _MXFP4 else None,
    )


def _itemsize(name: str) -> int:
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize
