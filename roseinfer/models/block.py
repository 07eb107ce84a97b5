"""One layer of a model: attention, then a feed-forward network, with norms around them and a residual stream."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from roseinfer.attention.heads import HeadNorms, HeadTransform
from roseinfer.attention.kv_scales import KVScales, read_kv_scales
from roseinfer.attention.rope import Rotary
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import ConfigError
from roseinfer.layers.experts import RoutedExperts
from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.gate import sigmoid_gated
from roseinfer.layers.linear import Linear, Split, StackedOutput, normed
from roseinfer.layers.norm import LayerNorm, RMSNorm
from roseinfer.layers.shared_expert import SharedExperts
from roseinfer.models.families.family import TensorNames
from roseinfer.models.linear_attention import LinearAttention
from roseinfer.models.projection_norm import load_projection_norm
from roseinfer.models.spec import ModelSpec
from roseinfer.models.step import StepContext
from roseinfer.parallel.group import RankGroup, share_of
from roseinfer.quant.base import ExpertShape, Norm, WeightSource


class AddingNorm(Norm, Protocol):
    """Norm that can stand between a part's result and the residual stream."""

    def added(self, x: torch.Tensor, residual: torch.Tensor, multiplier: float = 1.0) -> torch.Tensor:
        """Return residual + multiplier * norm(x) [T, width]; the result may overwrite the residual."""
        ...


def make_norm(spec: ModelSpec) -> AddingNorm:
    """Return a norm of the residual stream."""
    norm = spec.norm
    if norm.kind == "rms":
        return RMSNorm(spec.hidden_size, norm.eps, offset=norm.offset)
    return LayerNorm(spec.hidden_size, norm.eps, bias=norm.bias)


class Mixer(Protocol):
    """Part of a layer in which tokens see each other: attention, or linear attention."""

    @property
    def kv_scales(self) -> KVScales | None: ...

    def load(self, source: WeightSource, names: TensorNames, prefix: str) -> None: ...

    def __call__(
        self, step: StepContext, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the result for norm(x), x [T, hidden], plus the residual if there is one, which may be overwritten and
        may be x itself.
        """
        ...


class DecoderBlock:
    """Layer with a norm before each part or none: x + attention(norm(x)), then x + feed_forward(norm(x)).

    The products add the residual. Subclasses are blocks of other shapes.
    """

    def __init__(self, spec: ModelSpec, names: TensorNames, layer: int, rotary: Rotary | None) -> None:
        self._names = names
        self._attention = _mixer(spec, names, layer, rotary)
        self._feed_forward = _feed_forward(spec, layer)
        self._before_attention = None if names.before_attention is None else make_norm(spec)
        self._before_mlp = None if names.before_mlp is None else make_norm(spec)
        self._after_attention = None if names.after_attention is None else make_norm(spec)
        self._after_mlp = None if names.after_mlp is None else make_norm(spec)
        self._multiplier = spec.residual_multiplier

    @property
    def kv_scales(self) -> KVScales | None:
        """Scales of K and V in FP8 from the loaded checkpoint; None if it has none."""
        return self._attention.kv_scales

    def load(self, source: WeightSource, prefix: str) -> None:
        """Load the block's tensors, whose names begin with `prefix` and a dot."""
        names = self._names
        for norm, name in (
            (self._before_attention, names.before_attention),
            (self._after_attention, names.after_attention),
            (self._before_mlp, names.before_mlp),
            (self._after_mlp, names.after_mlp),
        ):
            if norm is not None:
                norm.load(source, f"{prefix}.{name}")
        self._attention.load(source, names, prefix)
        if not isinstance(self._feed_forward, FeedForward):
            assert names.experts is not None, "the family names no experts"
            self._feed_forward.load(source, names.experts.under(prefix))
        else:
            up = [f"{prefix}.{name}" for name in names.up]
            self._feed_forward.load(source, up, f"{prefix}.{names.down}", transposed=names.transposed)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the residual stream after this block. x: [T, hidden], which may be overwritten."""
        x = self._attention(step, self._before_attention, x, x)
        return self._feed_forward(self._before_mlp, x, x)

    def write(self, x: torch.Tensor, step: StepContext) -> None:
        """Write K and V of x [T, hidden] to the store, for later steps, in a layer with attention."""
        assert isinstance(self._attention, SelfAttention) and self._before_attention is not None
        self._attention.write(step, self._before_attention(x))


class ScaledBlock(DecoderBlock):
    """Layer with norms after its parts, or with a multiplier of what they add to the residual stream."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        x = self._add(self._after_attention, self._attention(step, self._before_attention, x, None), x)
        return self._add(self._after_mlp, self._feed_forward(self._before_mlp, x, None), x)

    def _add(self, norm: AddingNorm | None, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x.add_(result, alpha=self._multiplier)
        return norm.added(result, x, self._multiplier)


class ParallelBlock(DecoderBlock):
    """Layer whose parts read the same norm: x + attention(norm(x)) + feed_forward(norm(x))."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        assert self._before_attention is not None
        read = self._before_attention(x)
        return self._feed_forward(None, read, self._attention(step, None, read, x))


def make_block(spec: ModelSpec, names: TensorNames, layer: int, rotary: Rotary | None) -> DecoderBlock:
    """Return a layer of the shape that `spec` and `names` describe."""
    if spec.parallel:
        return ParallelBlock(spec, names, layer, rotary)
    plain = names.after_attention is None and names.after_mlp is None and spec.residual_multiplier == 1.0
    return (DecoderBlock if plain else ScaledBlock)(spec, names, layer, rotary)


def _mixer(spec: ModelSpec, names: TensorNames, layer: int, rotary: Rotary | None) -> Mixer:
    if spec.layers[layer].attention is None:
        assert names.delta is not None, "the family names no linear attention"
        return LinearAttention(spec, names.delta, layer)
    return SelfAttention(spec, spec.index_in_kind(layer), rotary)


def _feed_forward(spec: ModelSpec, layer: int) -> FeedForward | RoutedExperts | SharedExperts:
    experts = spec.experts
    if experts is None or layer in experts.dense_layers:
        return FeedForward(
            spec.hidden_size, spec.intermediate_size, spec.activation, gated=spec.gated, bias=spec.mlp_bias
        )
    shape = ExpertShape(
        count=experts.count,
        top_k=experts.top_k,
        hidden=spec.hidden_size,
        width=experts.width,
        renormalise=experts.renormalise,
        activation=experts.activation or spec.activation,
        bias=experts.bias,
    )
    return RoutedExperts(shape) if experts.shared_width is None else SharedExperts(shape, experts.shared_width)


class SelfAttention:
    """out(attention(qkv(norm(x)))), or out(attention(qkv(norm(x))) * sigmoid(gate(norm(x)))) with `output_gate`.

    Processes share the heads.
    """

    def __init__(self, spec: ModelSpec, layer: int, rotary: Rotary | None, inputs: int | None = None) -> None:
        """layer: index among the layers with attention. inputs: width of what the projections read, by default the
        hidden size.
        """
        self._layer = layer
        self._norm = spec.norm
        self._qk_norm = spec.qk_norm
        attention = spec.attention[layer]
        self._heads = HeadTransform(attention, rotary=rotary)
        self._projection_norm: Callable[[torch.Tensor], None] | None = None
        unit = attention.head_dim
        q_width = attention.heads * unit
        kv = StackedOutput(attention.kv_heads * unit, unit, repeat=True)
        outs = [StackedOutput(q_width, unit), kv, kv]
        self._gated = spec.output_gate
        if self._gated:  # the checkpoint has each head's gate after its query
            queries, gates = (StackedOutput(q_width, unit, stripe=(first, 2 * unit)) for first in (0, unit))
            outs = [queries, kv, kv, gates]
        self._qkv = Linear(inputs or spec.hidden_size, *outs, split=Split.OUTPUTS, bias=spec.qkv_bias)
        self._out = Linear(q_width, spec.hidden_size, split=Split.INPUTS, unit=unit, bias=spec.o_bias)

    def load(self, source: WeightSource, names: TensorNames, prefix: str) -> None:
        whole, group = self._heads.spec, source.build.group
        spec = held_heads(whole, group)
        qkv = [f"{prefix}.{name}" for name in names.qkv]
        scales = read_kv_scales(source, qkv, whole.kv_heads)
        self._heads = replace(self._heads, spec=spec, kv_scales=scales)
        if whole.sinks:
            assert names.sinks is not None, "the family names no sinks"
            sinks = torch.empty(spec.heads, device=source.build.device)
            source.read(f"{prefix}.{names.sinks}", sinks, shard=(share_of(group, whole.heads),))
            self._heads = replace(self._heads, sinks=sinks)
        self._qkv.load(source, *qkv, *qkv[: 1 if self._gated else 0], transposed=names.transposed)
        self._out.load(source, f"{prefix}.{names.out}", transposed=names.transposed)
        norms = (f"{prefix}.{names.qk_norms[0]}", f"{prefix}.{names.qk_norms[1]}")
        if self._qk_norm == "projection":
            self._projection_norm = load_projection_norm(source, norms, whole, self._norm.eps)
        elif self._qk_norm is not None:
            late, offset = self._qk_norm == "head_after_rotation", self._norm.offset
            loaded = HeadNorms.load(source, norms, spec, self._norm.eps, offset=offset, after_rotation=late)
            self._heads = replace(self._heads, norms=loaded)

    @property
    def kv_scales(self) -> KVScales | None:
        return self._heads.kv_scales

    def __call__(
        self, step: StepContext, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the result for x [T, hidden], plus the residual if there is one, which may be overwritten and may be
        x itself.
        """
        qkv = normed(self._qkv, norm, x)
        if self._projection_norm is not None:
            self._projection_norm(qkv)
        if not self._gated:
            return self._out(step.attention.forward(self._layer, qkv, self._heads), residual)
        width = self._heads.spec.qkv_width
        attended = step.attention.forward(self._layer, qkv[:, :width], self._heads)
        return self._out(sigmoid_gated(attended, qkv[:, width:]), residual)

    def write(self, step: StepContext, x: torch.Tensor) -> None:
        """Write K and V of x [T, inputs] to the store, for later steps. Nothing else is computed."""
        qkv = normed(self._qkv, None, x)
        step.attention.write(self._layer, qkv[:, : self._heads.spec.qkv_width] if self._gated else qkv, self._heads)


def held_heads(spec: AttentionSpec, group: RankGroup) -> AttentionSpec:
    """Return the part of a layer's attention that this process computes.

    Raise `ConfigError` if the heads cannot be divided evenly.
    """
    if spec.heads % group.size:
        raise ConfigError(
            f"tensor_parallel_size is {group.size}, but the model's {spec.heads} attention heads cannot be divided "
            f"evenly among {group.size} processes"
        )
    heads = share_of(group, spec.heads).width
    return replace(spec, heads=heads, kv_heads=share_of(group, spec.kv_heads, repeat=True).width)
