"""Names of a model's tensors in a GGUF file, and the order of their rows.

llama.cpp names a tensor by its role in a block, whatever the family calls it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from roseinfer.models.families import family_of
from roseinfer.models.families.family import TensorNames
from roseinfer.models.spec import MTP_HEAD, ModelSpec
from roseinfer.quant.expert_names import ExpertNames
from roseinfer.state.delta_spec import DeltaSpec

_KINDS = ("weight", "bias")
# GGUF architectures in whose files the halves of every head of q and k are interleaved: llama.cpp rotates neighbouring
# numbers of a head together, the model's own code numbers that are half a head apart.
_INTERLEAVED = ("llama", "granite", "mistral3", "smollm3")
# Norms before the feed-forward network that are not called ffn_norm.
_BEFORE_MLP = dict.fromkeys(("seed_oss", "gpt-oss", "qwen35", "qwen35moe"), "post_attention_norm")
# Logarithms of the decay of linear attention, which files have as -e^x.
_DECAY = "ssm_a"


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
        self._num_layers, self._has_drafts = spec.num_layers, MTP_HEAD in spec.left_out
        block = _block_names(names, before_mlp=_BEFORE_MLP.get(str(architecture), "ffn_norm"))
        for layer in range(spec.num_layers):
            own = f"{prefix}{names.block.format(layer)}."
            self._stored |= {own + name: StoredTensor(f"blk.{layer}.{stored}") for name, stored in block.items()}
            if spec.experts is not None and names.experts is not None:
                for name, stored, expert in _expert_names(names.experts, spec.experts.count):
                    self._stored[own + name] = StoredTensor(f"blk.{layer}.{stored}", expert)
            if spec.layers[layer].delta is not None and names.delta is not None:
                self._whole[own + names.delta.decay] = StoredTensor(f"blk.{layer}.{_DECAY}")
                self._whole[own + names.delta.dt_bias] = StoredTensor(f"blk.{layer}.ssm_dt.bias")
            if names.sinks is not None:
                self._whole[own + names.sinks] = StoredTensor(f"blk.{layer}.attn_sinks.weight")
        self._norm_offset = spec.norm.offset
        self._orders = _interleaved_rows(spec) if architecture in _INTERLEAVED else _delta_rows(spec)
        self._column_orders = _delta_columns(spec)

    def of(self, name: str) -> StoredTensor | None:
        """Return the tensor's place in the file; None if such files do not have it."""
        if name in self._whole:
            return self._whole[name]
        stem, _, kind = name.rpartition(".")
        place = self._stored.get(stem) if kind in _KINDS else None
        return None if place is None else StoredTensor(f"{place.name}.{kind}", place.part)

    def offset(self, gguf_name: str) -> float:
        """Return what the file's tensor has more than the model's: that of norms is added to their weights."""
        is_raised = gguf_name.endswith("norm.weight") and not gguf_name.endswith(".ssm_norm.weight")
        return self._norm_offset if is_raised else 0.0

    def is_decay(self, gguf_name: str) -> bool:
        """Return True if the file has -e^x for each number x of the model's tensor."""
        return gguf_name.endswith(f".{_DECAY}")

    def is_left_out(self, gguf_name: str) -> bool:
        """Return True if the tensor is of a draft head, whose layers follow those of the model."""
        kind, _, rest = gguf_name.partition(".")
        layer = rest.partition(".")[0]
        return self._has_drafts and kind == "blk" and layer.isdecimal() and int(layer) >= self._num_layers

    def row_order(self, gguf_name: str) -> np.ndarray | None:
        """Return the file's row for each row of the model's tensor; None if they are the same."""
        return self._orders.get(gguf_name)

    def column_order(self, gguf_name: str) -> np.ndarray | None:
        """Return the file's column for each column of the model's tensor; None if they are the same."""
        return self._column_orders.get(gguf_name)


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
        *_delta_names(names),
    ]
    return {own: stored for own, stored in roles if own is not None}


def _delta_names(names: TensorNames) -> Iterator[tuple[str, str]]:
    delta = names.delta
    if delta is not None:
        yield delta.qkv, "attn_qkv"
        yield delta.z, "attn_gate"
        yield delta.b, "ssm_beta"
        yield delta.a, "ssm_alpha"
        yield delta.conv, "ssm_conv1d"
        yield delta.norm, "ssm_norm"
        yield delta.out, "ssm_out"


def _expert_names(names: ExpertNames, count: int) -> Iterator[tuple[str, str, int | None]]:
    """Return the names of a layer's experts: one tensor of the file holds a matrix of all of them."""
    yield names.router, "ffn_gate_inp", None
    if names.shared is not None:
        yield names.shared.gate, "ffn_gate_shexp", None
        yield names.shared.up, "ffn_up_shexp", None
        yield names.shared.down, "ffn_down_shexp", None
        yield names.shared.factor, "ffn_gate_inp_shexp", None
    for expert in range(count):
        yield names.gate.format(expert), "ffn_gate_exps", expert
        yield names.up.format(expert), "ffn_up_exps", expert
        yield names.down.format(expert), "ffn_down_exps", expert


def _interleaved_rows(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Return the order of rows of each tensor whose heads the file interleaves."""
    orders: dict[tuple[int, int], np.ndarray] = {}
    found: dict[str, np.ndarray] = {}
    for layer, attention in enumerate(spec.attention):
        for name, heads in (("attn_q", attention.heads), ("attn_k", attention.kv_heads)):
            shape = heads, attention.head_dim
            if shape not in orders:
                rows = np.arange(heads * attention.head_dim).reshape(heads, attention.head_dim // 2, 2)
                orders[shape] = rows.swapaxes(1, 2).reshape(-1)
            found |= {f"blk.{layer}.{name}.{kind}": orders[shape] for kind in _KINDS}
    return found


def _delta_rows(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Return the order of rows of linear attention's tensors.

    Files have the first value head of each key head, then the second of each.
    """
    found: dict[str, np.ndarray] = {}
    for layer, delta in _deltas(spec):
        heads, values = _tiled(delta, 1), _tiled(delta, delta.value_dim)
        mixed = np.concatenate((np.arange(2 * delta.keys), 2 * delta.keys + values))
        orders = dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", _DECAY, "ssm_dt.bias"), heads)
        orders |= {"attn_gate.weight": values, "attn_qkv.weight": mixed, "ssm_conv1d.weight": mixed}
        found |= {f"blk.{layer}.{name}": order for name, order in orders.items()}
    return found


def _delta_columns(spec: ModelSpec) -> dict[str, np.ndarray]:
    return {f"blk.{layer}.ssm_out.weight": _tiled(delta, delta.value_dim) for layer, delta in _deltas(spec)}


def _deltas(spec: ModelSpec) -> Iterator[tuple[int, DeltaSpec]]:
    for number, layer in enumerate(spec.layers):
        if layer.delta is not None:
            yield number, layer.delta


def _tiled(delta: DeltaSpec, width: int) -> np.ndarray:
    """Return the file's place of each number of all value heads, which have `width` numbers each."""
    places = np.arange(delta.value_heads * width).reshape(delta.group, delta.key_heads, width)
    return places.swapaxes(0, 1).reshape(-1)
