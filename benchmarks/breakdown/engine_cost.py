"""Bytes and operations of a running engine's step, from the engine's description."""

import torch

from benchmarks.gpu_rows import INT4_BYTES, MXFP4_BYTES, NVFP4_BYTES
from benchmarks.model_cost import ModelCost
from roseinfer.engine.api import EngineInfo
from roseinfer.models.spec import ModelSpec

_FP8, _INT8, _INT4, _MXFP4, _NVFP4, _WIDENED = "fp8", "int8", "int4", "mxfp4", "nvfp4", "widened"
_FP8_HEAD = ", output head in fp8"


def engine_cost(spec: ModelSpec, info: EngineInfo) -> ModelCost:
    """Return the cost of the model of `spec` as the engine stores it: weights and K/V in at least 16 bits, or in 8,
    layers also in 4 and experts in MXFP4.

    The head takes one byte with int8 or `lm_head_dtype` fp8. Layers that a checkpoint keeps in 16 bits beside FP8 count
    as FP8. Raise like `ModelCost.of`.
    """
    itemsize = _itemsize(info.facts.dtype)
    layers, found, head = info.facts.weights.partition(_FP8_HEAD)
    narrow = layers.startswith(_INT8) or (found and not head.endswith(_WIDENED))
    return ModelCost.of(
        spec,
        itemsize,
        layer_itemsize=_layer_itemsize(layers) or itemsize,
        kv_itemsize=1 if info.kv_cache.startswith(_FP8) else _itemsize(info.kv_cache),
        head_itemsize=1 if narrow else itemsize,
        expert_itemsize=MXFP4_BYTES if layers == _MXFP4 else None,
    )


def _layer_itemsize(weights: str) -> float | None:
    """Return the bytes of a weight stored as `weights` says; None if it is in the model's dtype."""
    if weights.endswith(_WIDENED):
        return None
    sizes = {_FP8: 1, _INT8: 1, _INT4: INT4_BYTES, _NVFP4: NVFP4_BYTES}
    return next((size for kind, size in sizes.items() if weights.startswith(kind)), None)


def _itemsize(name: str) -> int:
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize
