"""Checkpoints with weights in four bits, packed here as each tool packs them, and the same widened."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.fp8_files import is_linear

Tensors = dict[str, torch.Tensor]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Drawn:
    """Codes, scales and zeros of a matrix [rows, columns].

    codes: [rows, columns], zeros: [rows, groups], both 0 to 15. scales: [rows, groups]. group_of: [columns].
    """

    codes: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    group_of: np.ndarray

    @property
    def wide(self) -> torch.Tensor:
        """The matrix by the formula of all these tools, in float32."""
        steps = torch.from_numpy((self.codes - self.zeros[:, self.group_of]).astype(np.float32))
        return steps * self.scales.float()[:, torch.from_numpy(self.group_of)]


def draw(
    rows: int,
    columns: int,
    group: int,
    rng: np.random.Generator,
    *,
    symmetric: bool = False,
    disordered: bool = False,
    group_of: np.ndarray | None = None,
    dtype: torch.dtype = torch.float16,
) -> Drawn:
    """Draw a matrix in which all codes and zeros occur, 0 and 15 among them.

    disordered: columns are in groups at random, as GPTQ's `desc_act` leaves them.
    """
    codes = rng.integers(0, 16, (rows, columns))
    shape = (rows, columns // group)
    zeros = np.full(shape, 8) if symmetric else rng.integers(0, 16, shape)
    if not symmetric:
        zeros.flat[:2] = (0, 15)
    scales = torch.from_numpy(rng.uniform(0.002, 0.02, shape)).to(dtype)
    order = np.arange(columns) // group
    if group_of is not None:
        order = group_of
    elif disordered:
        order = rng.permutation(order)
    return Drawn(codes, scales, zeros, order)


def rounded(weight: torch.Tensor, group: int) -> Drawn:
    """The nearest codes of a matrix whose groups range from their smallest number to their largest."""
    parts = weight.float().unflatten(1, (-1, group))
    least, most = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((most - least) / 15).clamp(min=1e-4).to(torch.float16)
    zeros = (-least / scales.float()).round().clamp(0, 15)
    codes = (parts / scales.float()[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    order = np.arange(weight.shape[1]) // group
    return Drawn(codes.flatten(1).numpy().astype(int), scales, zeros.numpy().astype(int), order)


def _words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return int32 words [.., n / 8], whose nibble i, from the low end, is code order[i] of eight."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for place, number in enumerate(order):
        words |= eights[..., number] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def awq(drawn: Drawn) -> Tensors:
    return {
        "qweight": _words(drawn.codes.T, _AWQ_ORDER),
        "qzeros": _words(drawn.zeros.T, _AWQ_ORDER),
        "scales": drawn.scales.T,
    }


def gptq_v2(drawn: Drawn) -> Tensors:
    return {
        "qweight": _words(drawn.codes).T,
        "qzeros": _words(drawn.zeros.T),
        "scales": drawn.scales.T,
        "g_idx": torch.from_numpy(drawn.group_of.astype(np.int32)),
    }


def gptq(drawn: Drawn) -> Tensors:
    stored = (drawn.zeros - 1) % 16
    return gptq_v2(Drawn(drawn.codes, drawn.scales, stored, drawn.group_of))


def pack_quantized(drawn: Drawn) -> Tensors:
    """Signed codes and zeros have 8 added when they are packed: they are stored as they were drawn."""
    rows, columns = drawn.codes.shape
    found = {
        "weight_packed": _words(drawn.codes),
        "weight_scale": drawn.scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if (drawn.zeros != 8).any():
        padded = np.pad(drawn.zeros, ((0, -rows % 8), (0, 0)))
        found["weight_zero_point"] = _words(padded.T).T
    if (np.diff(drawn.group_of) < 0).any():
        found["weight_g_idx"] = torch.from_numpy(drawn.group_of.astype(np.int32))
    return found


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": False,
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "lm_head": False,
    "true_sequential": True,
    "damp_percent": 0.1,
    "meta": {"quantizer": ["gptqmodel:4.0.0"]},
}
PACKED_ARGS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "actorder": None,
    "dynamic": False,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": PACKED_ARGS,
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "version": "0.11.0",
}


def packed_config(**args: Any) -> dict[str, Any]:
    group = PACKED["config_groups"]["group_0"]
    return {**PACKED, "config_groups": {"group_0": {**group, "weights": {**PACKED_ARGS, **args}}}}


@dataclass(frozen=True)
class Int4Maker:
    """A tool: its entry in config.json, how it packs a matrix, and what it draws. rounds: it rounds weights instead."""

    name: str
    config: dict[str, Any]
    pack: Callable[[Drawn], Tensors]
    group: int | None = 32  # None: a row
    options: dict[str, Any] = field(default_factory=dict)
    rounds: bool = False


MAKERS = [
    Int4Maker("awq", AWQ, awq),
    Int4Maker("gptq", {**GPTQ, "sym": True}, gptq, options={"symmetric": True}),
    Int4Maker("gptq-v2", {**GPTQ, "checkpoint_format": "gptq_v2"}, gptq_v2),
    Int4Maker("packed", packed_config(group_size=64), pack_quantized, 64, {"symmetric": True, "dtype": torch.bfloat16}),
    Int4Maker("packed-zeros", packed_config(symmetric=False, actorder="weight"), pack_quantized),
]
DISORDERED = [
    Int4Maker("gptq", {**GPTQ, "sym": True, "desc_act": True}, gptq, options={"symmetric": True, "disordered": True}),
    Int4Maker(
        "gptq-v2", {**GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True}, gptq_v2, options={"disordered": True}
    ),
    Int4Maker(
        "packed",
        packed_config(actorder="group"),
        pack_quantized,
        options={"symmetric": True, "disordered": True},
    ),
]
# Layers of one product, which read the same inputs.
_STACKED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def quantise_int4(tensors: Tensors, maker: Int4Maker, seed: int = 0) -> tuple[Tensors, Tensors]:
    """Return a checkpoint whose linear layers are drawn or rounded, and packed, and the same widened in float32."""
    rng = np.random.default_rng(seed)
    narrow, wide = dict(tensors), dict(tensors)
    orders: dict[str, np.ndarray] = {}
    for name in sorted(filter(is_linear, tensors), key=lambda name: ("k_proj" in name or "v_proj" in name, name)):
        layer = name.removesuffix(".weight")
        before, _, last = layer.rpartition(".")
        order = orders.get(f"{before}.{_STACKED.get(last, last)}")
        group = maker.group or tensors[name].shape[1]
        if maker.rounds:
            drawn = rounded(tensors[name], group)
        else:
            drawn = draw(*tensors[name].shape, group, rng, group_of=order, **maker.options)
        orders[layer] = drawn.group_of
        del narrow[name]
        narrow |= {f"{layer}.{part}": tensor for part, tensor in maker.pack(drawn).items()}
        wide[name] = drawn.wide
    return narrow, wide


def quantise_folder(folder: Path, maker: Int4Maker) -> Tensors:
    """Rewrite a saved model as `quantise_int4` does; return the widened tensors."""
    narrow, wide = quantise_int4(load_file(folder / "model.safetensors"), maker)
    write_tensors(folder, narrow)
    state_quantization(folder, maker.config)
    return wide


def write_tensors(folder: Path, tensors: Tensors) -> None:
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def state_quantization(folder: Path, quantization: dict[str, Any] | None) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
