"""Decoder-only models: an embedding, blocks on a residual stream, a norm and a head.

A family (gpt2.py, llama.py) provides its blocks and the names of its tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadNorms, HeadTransform
from roseinfer.attention.kv_scales import KVScales, read_kv_scales
from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.errors import ConfigError
from roseinfer.layers.embedding import Embedding, LMHead, VocabEmbedding
from roseinfer.layers.linear import Linear, NormedLinear, Split, StackedOutput
from roseinfer.models.spec import ModelSpec
from roseinfer.parallel.group import RankGroup, share_of
from roseinfer.quant.base import Build, Norm, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a checkpoint's tensors outside the blocks, and the prefix of each block's tensors.

    positions: table of learned positions, None without one. block: template with a placeholder for the layer's number.
    """

    tokens: str
    positions: str | None = None
    block: str
    norm: str
    head: str = "lm_head"


class DecoderBlock(Protocol):
    """One layer of a model: attention, then feed-forward."""

    @property
    def kv_scales(self) -> KVScales | None:
        """Scales of K and V in FP8 from the loaded checkpoint; None if it has none."""
        ...

    def load(self, source: WeightSource, prefix: str) -> None: ...

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Return the residual stream after this block. x: [T, hidden], which may be overwritten."""
        ...


class FeedForward(Protocol):
    """Second part of a layer, with the norm before it and the residual around it."""

    def load(self, source: WeightSource, norm: str, prefix: str) -> None:
        """Load the norm called `norm` and the part's own tensors, whose names begin with `prefix`."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this part. x: [T, hidden], which may be overwritten."""
        ...


class ModelFamily(Protocol):
    """Blocks and tensor names of one family of models."""

    ignored: tuple[str, ...]
    """Patterns of checkpoint tensors that no layer needs."""

    def norm(self) -> Norm:
        """Return the norm before the head."""
        ...

    def block(self, layer: int) -> DecoderBlock: ...

    def names(self, source: WeightSource) -> TensorNames: ...


class Decoder:
    """Implementation of `CausalLM` for any family."""

    def __init__(self, spec: ModelSpec, build: Build, family: ModelFamily) -> None:
        self.spec, self.dtype, self.device = spec, build.dtype, build.device
        self.weights = build.weight_format.stored_as or str(build.dtype).removeprefix("torch.")
        self.attention = tuple(held_heads(layer, build.group) for layer in spec.attention)
        self.ignored = family.ignored
        self._family = family
        self._tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size)
        self._positions = Embedding(spec.max_position, spec.hidden_size) if spec.rope is None else None
        self._blocks: Sequence[DecoderBlock] = [family.block(layer) for layer in range(spec.num_layers)]
        self._head = LMHead(family.norm(), spec.hidden_size, spec.vocab_size, tied=spec.tied_embeddings)

    def load(self, source: WeightSource) -> None:
        names = self._family.names(source)
        self._tokens.load(source, names.tokens)
        if self._positions is not None:
            assert names.positions is not None
            self._positions.load(source, names.positions)
        for layer, block in enumerate(self._blocks):
            block.load(source, names.block.format(layer))
        self._head.load(source, names.norm, names.head, self._tokens)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        x = self._tokens(batch.input_ids)
        if self._positions is not None:
            x = x + self._positions(batch.positions)
        for block in self._blocks:
            x = block(x, attention)
        return x

    @property
    def kv_scales(self) -> tuple[KVScales | None, ...]:
        return tuple(block.kv_scales for block in self._blocks)

    @property
    def padded_vocab(self) -> int:
        return self._head.padded_vocab

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.normed(hidden)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._head(hidden, out)


class SelfAttention:
    """Attention part of a layer: x + out(attention(qkv(norm(x)))). Processes share the heads."""

    def __init__(
        self, norm: Norm, hidden: int, layer: int, heads: HeadTransform, *, qkv_bias: bool, out_bias: bool
    ) -> None:
        """`heads`: all heads of the model; head norms are loaded later."""
        self._layer = layer
        self._heads = heads
        self._norm_eps = norm.eps
        spec = heads.spec
        q_width, unit = spec.heads * spec.head_dim, spec.head_dim
        kv = StackedOutput(spec.kv_heads * spec.head_dim, unit, repeat=True)
        qkv = Linear(hidden, StackedOutput(q_width, unit), kv, kv, split=Split.OUTPUTS, bias=qkv_bias)
        self._qkv = NormedLinear(norm, qkv)
        self._out = Linear(q_width, hidden, split=Split.INPUTS, unit=unit, bias=out_bias)

    def load(
        self,
        source: WeightSource,
        norm: str,
        qkv: Sequence[str],
        out: str,
        *,
        head_norms: tuple[str, str] | None = None,
        transposed: bool = False,
    ) -> None:
        """Load the weights.

        `qkv`: names of q, k and v, or one name if they are stacked. `head_norms`: names of the norms of q and k.
        """
        spec = held_heads(self._heads.spec, source.build.group)
        scales = read_kv_scales(source, qkv, self._heads.spec.kv_heads)
        self._heads = replace(self._heads, spec=spec, kv_scales=scales)
        self._qkv.load(source, norm, *qkv, transposed=transposed)
        self._out.load(source, out, transposed=transposed)
        if head_norms is not None:
            self._heads = replace(self._heads, norms=HeadNorms.load(source, *head_norms, spec, self._norm_eps))

    @property
    def kv_scales(self) -> KVScales | None:
        return self._heads.kv_scales

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Return the residual stream after attention. x: [T, hidden], which may be overwritten."""
        return self._out(attention.forward(self._layer, self._qkv(x), self._heads), x)


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
