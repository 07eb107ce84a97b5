"""Checkpoints with two layers as large as in real models, in the formats in which these are published."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import roseinfer
from tests.equivalence.models import save_model
from tests.helpers.fp8_files import Tensors, by_block, is_linear, quantise
from tests.helpers.int4_files import AWQ, state_quantization, write_tensors
from tests.helpers.mxfp4_files import QUANTIZATION as MXFP4
from tests.models.test_quantization import MODELOPT_NVFP4, QWEN3_FP8

_SHAPES = Path(roseinfer.__file__).parent / "assets" / "shapes"
# Fields of config.json that decide the shapes of products and what attention sees.
_SIZES = (
    "attention_bias",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "moe_intermediate_size",
    "n_embd",
    "n_head",
    "num_attention_heads",
    "num_experts_per_tok",
    "num_key_value_heads",
    "query_pre_attn_scalar",
    "shared_expert_intermediate_size",
    "sliding_window",
)
_LESS = {"vocab_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 8192}
_GROUP = 128  # columns of a scale of int4
_BLOCK = 32  # columns of a scale of MXFP4
_NVFP4_GROUP = 16  # columns of a scale of NVFP4

Store = Callable[[Tensors], tuple[Tensors, dict[str, Any] | None]]


def as_floats(tensors: Tensors) -> tuple[Tensors, None]:
    return tensors, None


def as_fp8(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    return quantise(tensors, "weight_scale_inv", by_block)[0], QWEN3_FP8


def as_int4(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Draw codes from 0 to 15 and zeros from 6 to 9 of linear layers, as AWQ stores them."""
    found = dict(tensors)
    for name in filter(is_linear, tensors):
        (outputs, inputs), layer = found.pop(name).shape, name.removesuffix(".weight")
        # Codes less these zeros have a standard deviation of 4.7.
        scales = (0.5 + torch.rand(inputs // _GROUP, outputs)) / 4.7 / inputs**0.5
        found[f"{layer}.qweight"] = _words(inputs, outputs // 8)
        found[f"{layer}.qzeros"] = (_words(inputs // _GROUP, outputs // 8).long() & 0x33333333).add(0x66666666).int()
        found[f"{layer}.scales"] = scales.half()
    return found, {**AWQ, "group_size": _GROUP}


def as_nvfp4(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Draw codes and scales of linear layers, as modelopt stores them."""
    found = dict(tensors)
    for name in filter(is_linear, tensors):
        (outputs, inputs), layer = found.pop(name).shape, name.removesuffix(".weight")
        found[f"{layer}.weight"] = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scales = 448 * (0.5 + torch.rand(outputs, inputs // _NVFP4_GROUP)) / 1.5
        found[f"{layer}.weight_scale"] = scales.to(torch.float8_e4m3fn)
        # Codes have a standard deviation of 2.9, and scales a mean of 299.
        found[f"{layer}.weight_scale_2"] = (0.5 + torch.rand(())) / 2.9 / 299 / inputs**0.5
    return found, MODELOPT_NVFP4


def as_mxfp4(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    """Draw codes and scales of experts."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = found.pop(name).shape
        blocks = experts, outputs, inputs // _BLOCK
        found[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, _BLOCK // 2), dtype=torch.uint8)
        # Codes have a standard deviation of 2.9.
        middle = 127 - round(torch.tensor(2.9 * inputs**0.5).log2().item())
        found[f"{name}_scales"] = torch.randint(middle - 1, middle + 2, blocks, dtype=torch.uint8)
    return found, MXFP4


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


@dataclass(frozen=True)
class RealLayers:
    """Layers of a model in `assets/shapes`.

    max_error: of a token's logits, relative to their norm; about twice that of an H200. changes: of its fields.
    gains: as in `save_model`. routed: each token chooses some of the experts.
    """

    shape: str
    family: str
    max_error: float
    store: Store = as_floats
    changes: Mapping[str, object] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    routed: bool = False

    def save(self, folder: Path, device: str) -> Path:
        """Draw the weights on that device and write them."""
        config = json.loads((_SHAPES / self.shape / "config.json").read_text())
        config = config.get("text_config", config)
        sizes = {name: config[name] for name in _SIZES if name in config}
        with torch.device(device):
            save_model(self.family, {**sizes, **_LESS, **self.changes}, folder, self.gains)
            tensors, quantization = self.store(load_file(folder / "model.safetensors", device))
        write_tensors(folder, tensors)
        if quantization is not None:
            state_quantization(folder, quantization)
        return folder


# Tokens whose embeddings stand out choose different experts; a sharp router hardly weighs those at near ties.
_SPREAD = {"embed_tokens.weight": 7.0, ".mlp.gate.weight": 2.0, ".mlp.router.weight": 2.0}
_QWEN3_8B = {"shape": "Qwen--Qwen3-8B", "family": "qwen3"}
_QWEN3_30B: dict[str, Any] = {
    "shape": "Qwen--Qwen3-30B-A3B",
    "family": "qwen3-moe",
    "changes": {"num_experts": 16},
    "gains": _SPREAD,
    "routed": True,
}
_HYBRID = {
    "num_experts": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}
# Both factors of a product are rounded to FP8: inputs alone add 2.6% in each product.
REAL_LAYERS = {
    "gemma-3-27b": RealLayers(
        "google--gemma-3-27b-it",
        "gemma3",
        0.02,
        changes={"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3-8b": RealLayers(**_QWEN3_8B, max_error=0.025),
    "qwen3-8b-fp8": RealLayers(**_QWEN3_8B, max_error=0.2, store=as_fp8),
    "qwen3-8b-int4": RealLayers(**_QWEN3_8B, max_error=0.03, store=as_int4),
    "qwen3-8b-nvfp4": RealLayers(**_QWEN3_8B, max_error=0.03, store=as_nvfp4),
    "qwen3-30b-a3b": RealLayers(**_QWEN3_30B, max_error=0.03),
    "qwen3-30b-a3b-fp8": RealLayers(**_QWEN3_30B, max_error=0.2, store=as_fp8),
    "qwen3-30b-a3b-int4": RealLayers(**_QWEN3_30B, max_error=0.04, store=as_int4),
    "qwen3-30b-a3b-nvfp4": RealLayers(**_QWEN3_30B, max_error=0.04, store=as_nvfp4),
    "gpt-oss-20b": RealLayers(
        "openai--gpt-oss-20b",
        "gpt-oss",
        0.04,
        as_mxfp4,
        changes={"num_local_experts": 8},
        gains=_SPREAD,
        routed=True,
    ),
    "qwen3.6-35b-a3b": RealLayers(
        "Qwen--Qwen3.6-35B-A3B", "qwen3.5-moe", 0.03, changes=_HYBRID, gains=_SPREAD, routed=True
    ),
    "gpt2": RealLayers("gpt2", "gpt2", 0.015, changes={"n_layer": 2, "n_positions": 4096}),
}
