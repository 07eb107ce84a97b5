"""Names of a model's tensors in a GGUF file, and the order of their rows.

llama.cpp names a tensor by its role in a block, whatever the family calls it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from roseinfer.models.families import family_of
from roseinfer.models.families.family import TensorNames
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.expert_names import ExpertNames

_KINDS = ("weight", "bias")
# GGUF architectures in whose files the halves of every head of q and k are interleaved: llama.cpp rotates neighbouring
# numbers of a head together, the model's own code numbers that are half a head apart.
_INTERLEAVED = ("llama", "granite", "mistral3", "smollm3")
# Norms before the feed-forward network that are not called ffn_norm.
_BEFORE_MLP = {"seed_oss": "post_attention_norm", "gpt-oss": "post_attention_norm"}


class StoredTensor(NamedTuple):
    """Tensor of a file that holds one of the model's tensors: all of it, or slice `part` of its first dimension."""

    name: str
    part: int | None = None


class GgufNames:
    """Mapping from the names of a model's own checkpoint to those of its GGUF file.

    architecture: the file's `general.architecture`.
    """

    def __init__(self, spec: ModelSpec, architecture: object) -> None:
        family = family_of(spec.architecture)
        assert family is not None, f"{spec.architecture} is of no family"
        names, prefix = family.names, family.prefixes[0]
        self._stored = {prefix + own: StoredTensor(stored) for own, stored in _end_names(names)}
        self._stored[family.heads[0]] = StoredTensor("output")
        self._whole: dict[str, StoredTensor] = {}  # of names without an ending
        block = _block_names(names, before_mlp=_BEFORE_MLP.get(str(architecture), "ffn_norm"))
        for layer in range(spec.num_layers):
            own = f"{prefix}{names.block.format(layer)}."
            self._stored |= {own + name: StoredTensor(f"blk.{layer}.{stored}") for name, stored in block.items()}
            if spec.experts is not None and names.experts is not None:
                for name, stored, expert in _expert_names(names.experts, spec.experts.count):
                    self._stored[own + name] = StoredTensor(f"blk.{layer}.{stored}", expert)
            if names.sinks is not None:
                self._whole[own + names.sinks] = StoredTensor(f"blk.{layer}.attn_sinks.weight")
        self._norm_offset = spec.norm.offset
        self._orders = _row_orders(spec) if architecture in _INTERLEAVED else {}

    def of(self, name: str) -> StoredTensor | None:
        """Return the tensor's place in the file; None if such files do not have it."""
        if name in self._whole:
            return self._whole[name]
        stem, _, kind = name.rpartition(".")
        place = self._stored.get(stem) if kind in _KINDS else None
        return None if place is None else StoredTensor(f"{place.name}.{kind}", place.part)

    def offset(self, gguf_name: str) -> float:
        """Return what the file's tensor has more than the model's: that of norms is added to their weights."""
        return self._norm_offset if gguf_name.endswith("norm.weight") else 0.0

    def row_order(self, gguf_name: str) -> np.ndarray | None:
        """Return the file's row for each row of the model's tensor; None if they are the same."""
        shape = self._orders.get(gguf_name.rpartition(".")[0])
        if shape is None:
            return None
        heads, width = shape
        return np.arange(heads * width).reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(-1)


def _end_names(names: TensorNames) -> Iterator[tuple[str, str]]:
    yield names.tokens, "token_embd"
    yield names.norm, "output_norm"
    if names.positions is not None:
        yield names.positions, "position_embd"


def _block_names(names: TensorNames, before_mlp: str) -> dict[str, str]:
    """Return the names in a block by the family's. `before_mlp`: name of the norm before the feed-forward network."""
    roles = [
        (names.before_attention, "attn_norm"),
        *zip(names.qkv, ("attn_q", "attn_k", "attn_v") if len(names.qkv) > 1 else ("attn_qkv",), strict=True),
        *zip(names.qk_norms, ("attn_q_norm", "attn_k_norm"), strict=True),
        (names.out, "attn_output"),
        (names.after_attention, "post_attention_norm"),
        (names.before_mlp, before_mlp),
        *zip(names.up, ("ffn_gate", "ffn_up") if len(names.up) > 1 else ("ffn_up",), strict=True),
        (names.down, "ffn_down"),
        (names.after_mlp, "post_ffw_norm"),
    ]
    return {own: stored for own, stored in roles if own is not None}


def _expert_names(names: ExpertNames, count: int) -> Iterator[tuple[str, str, int | None]]:
    """Return the names of a layer's experts: one tensor of the file holds a matrix of all of them."""
    yield names.router, "ffn_gate_inp", None
    for expert in range(count):
        yield names.gate.format(expert), "ffn_gate_exps", expert
        yield names.up.format(expert), "ffn_up_exps", expert
        yield names.down.format(expert), "ffn_down_exps", expert


def _row_orders(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return heads and their width, for each tensor whose heads the file interleaves."""
    found = {}
    for layer, attention in enumerate(spec.attention):
        found[f"blk.{layer}.attn_q"] = attention.heads, attention.head_dim
        found[f"blk.{layer}.attn_k"] = attention.kv_heads, attention.head_dim
    return found
