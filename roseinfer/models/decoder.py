"""Decoder-only models: an embedding, blocks on a residual stream, a norm and a head."""

import re
from collections.abc import Sequence

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.rope import Rotary
from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.layers.embedding import Embedding, LMHead, VocabEmbedding
from roseinfer.models.block import held_heads, make_block, make_norm
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.spec import LayerSpec, ModelSpec
from roseinfer.models.step import StepContext
from roseinfer.quant.base import Build, Norm, WeightSource
from roseinfer.state.spec import StateSpec


class Decoder:
    """Implementation of `CausalLM` for any family."""

    def __init__(self, spec: ModelSpec, build: Build, family: ModelFamily) -> None:
        self.spec, self.dtype, self.device = spec, build.dtype, build.device
        self.weights = build.weight_format.stored_as or str(build.dtype).removeprefix("torch.")
        self.attention = tuple(held_heads(layer, build.group) for layer in spec.attention)
        self._deltas = tuple(delta.held(build.group.size) for delta in spec.deltas)
        self.ignored = family.ignored
        self._embedding_multiplier = spec.embedding_multiplier
        if spec.embedding_multiplier_rounded:
            self._embedding_multiplier = torch.tensor(spec.embedding_multiplier, dtype=build.dtype).item()
        self._scales_logits = spec.logit_multiplier != 1.0 or spec.logit_cap is not None
        if spec.tied_embeddings:
            self.ignored += tuple(rf"{re.escape(head)}\.weight" for head in family.heads)
        self._family = family
        self._adapting = build.adapting
        self._tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size)
        self._positions = Embedding(spec.max_position, spec.hidden_size) if spec.learned_positions else None
        rotaries = _Rotaries(spec, build.device)
        self._blocks = [
            make_block(spec, family.names, number, rotaries.of(layer)) for number, layer in enumerate(spec.layers)
        ]
        self._head = LMHead(make_norm(spec), spec.hidden_size, spec.vocab_size)

    def load(self, source: WeightSource) -> None:
        names = self._family.names
        prefix = _first_stored(self._family.prefixes, f"{names.tokens}.weight", source)
        self._tokens.load(source, prefix + names.tokens)
        if self._positions is not None:
            assert names.positions is not None, "the family names no table of positions"
            self._positions.load(source, prefix + names.positions)
        for layer, block in enumerate(self._blocks):
            block.load(source, prefix + names.block.format(layer))
        head = _first_stored(self._family.heads, ".weight", source)
        tied = self.spec.tied_embeddings
        if tied is None:
            tied = f"{head}.weight" not in source
        self._head.load(source, prefix + names.norm, None if tied else head, self._tokens)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        step, x = self._begin(batch, attention)
        for block in self._blocks:
            x = block(x, step)
        return x

    def forward_with_states(
        self, batch: ForwardBatch, attention: AttentionBackend, boundaries: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `forward` returns, and the residual streams entering some layers side by side.

        boundaries: n ascending numbers of layers; the number of layers stands for the stream after the last one. The
        states are [T, n * hidden].
        """
        step, x = self._begin(batch, attention)
        states = x.new_empty((x.shape[0], len(boundaries), x.shape[1]))
        done = 0
        for place, boundary in enumerate(boundaries):
            for block in self._blocks[done:boundary]:
                x = block(x, step)
            states[:, place] = x  # a copy, since blocks overwrite their inputs
            done = boundary
        for block in self._blocks[done:]:
            x = block(x, step)
        return x, states.flatten(1)

    def _begin(self, batch: ForwardBatch, attention: AttentionBackend) -> tuple[StepContext, torch.Tensor]:
        """Return the context of a step and the residual stream entering the first layer."""
        if self._adapting is not None:
            self._adapting.begin(batch.adapters)
        return StepContext(batch, attention), self._entering(batch)

    def _entering(self, batch: ForwardBatch) -> torch.Tensor:
        x = self._tokens(batch.input_ids)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        if self._positions is not None:
            x = x + self._positions(batch.positions)
        return x

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the embedding's table for ids [T], without any multiplier."""
        return self._tokens(ids)

    def head_after(self, norm: Norm) -> LMHead:
        """Return a head that shares the output matrix and applies another norm, which is loaded."""
        return self._head.after(norm)

    def state_specs(self, row_drafts: int = 0) -> tuple[StateSpec, ...]:
        dtype = str(self.dtype).removeprefix("torch.")
        return tuple(delta.state(dtype, row_drafts) for delta in self._deltas)

    @property
    def kv_scales(self) -> tuple[KVScales | None, ...]:
        both = zip(self._blocks, self.spec.layers, strict=True)
        return tuple(block.kv_scales for block, layer in both if layer.attention is not None)

    @property
    def padded_vocab(self) -> int:
        return self._head.padded_vocab

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.normed(hidden)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._head(hidden, out)
        return self._scaled(logits) if self._scales_logits else logits

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        logits.mul_(self.spec.logit_multiplier)
        cap = self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _Rotaries:
    """Rotations of a model's layers; layers of one kind share one, and its table of angles."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._longest, self._device = spec.max_position, device
        self._made: dict[tuple[RopeSpec, int], Rotary] = {}

    def of(self, layer: LayerSpec) -> Rotary | None:
        if layer.rope is None:
            return None
        key = layer.rope, layer.head_dim
        if key not in self._made:
            self._made[key] = Rotary.of(layer.rope, layer.head_dim, self._longest, self._device)
        return self._made[key]


def _first_stored(candidates: Sequence[str], end: str, source: WeightSource) -> str:
    """Return the first candidate that a tensor called candidate + end exists for; without any, the first."""
    return next((name for name in candidates if f"{name}{end}" in source), candidates[0])
