"""EAGLE-3 head: one decoder layer between a fusion of the target's states and an output matrix of its own.

Its input at position p is token p and the state of position p - 1: the fused streams of the target where they are
known, and otherwise the head's own result there. It predicts token p + 1.

So slot p of its KV layer depends on tokens up to p, like a slot of the target's layers: prefixes are shared by the same
keys. Publications number entries by the state's position, one earlier. Rotations see differences of positions only, so
the shift does not matter. Slot 0 has no entry (`AttentionSpec.skips_first`).
"""

from typing import Protocol

import torch

from roseinfer.attention.rope import Rotary
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.layers.embedding import LMHead, VocabEmbedding
from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.linear import Linear, Split
from roseinfer.layers.norm import RMSNorm
from roseinfer.models.base import CausalLM
from roseinfer.models.block import SelfAttention
from roseinfer.models.eagle.spec import EagleSpec
from roseinfer.models.families.family import TensorNames
from roseinfer.models.step import StepContext
from roseinfer.quant.base import Build, Norm, WeightSource

# Names of the layer: that of EAGLE and SpecForge, that of speculators.
_LAYER_NAMES = ("midlayer", "layers.0")


class HeadTarget(CausalLM, Protocol):
    """Model that a head may share its embedding and output matrix with."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the embedding's table for ids [T], without any multiplier."""
        ...

    def head_after(self, norm: Norm) -> LMHead:
        """Return a head that shares the output matrix and applies another norm, which is loaded."""
        ...


class EagleHead:
    """Head for one target. It is built without memory; `load` gives it weights.

    target_ids: [draft vocabulary] int64, the target's token for each of the head's, in ascending order.
    """

    target_ids: torch.Tensor

    def __init__(self, spec: EagleSpec, target: HeadTarget, build: Build) -> None:
        model, layer, eps = spec.after(target.spec), spec.layer, spec.norm.eps
        self.spec = spec
        self.attention = spec.attention
        self._target = target
        count, hidden = len(spec.boundaries), spec.hidden_size
        self._all_streams_norm = RMSNorm(count * spec.state_width, eps) if spec.norm_before_fc else None
        self._stream_norms = [RMSNorm(spec.state_width, eps) for _ in range(count if spec.fc_norm else 0)]
        self._fc = Linear(count * spec.state_width, hidden, split=Split.OUTPUTS)
        self._token_norm, self._state_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        rotary = None
        if layer.rope is not None:
            rotary = Rotary.of(layer.rope, layer.head_dim, model.max_position, build.device)
        self._attention = SelfAttention(model, target.spec.num_layers, rotary, 2 * hidden)
        self._before_mlp = RMSNorm(hidden, eps)
        self._mlp = FeedForward(hidden, spec.intermediate_size, spec.activation, bias=spec.mlp_bias)
        self._norm = RMSNorm(hidden, eps)
        self._embed = target.embed
        self._lm_head = LMHead(self._norm, hidden, spec.draft_vocab_size)

    def load(self, source: WeightSource, target_ids: torch.Tensor) -> None:
        """Load all weights. Raise `UnsupportedModelError` naming a tensor that is missing or misshaped."""
        self.target_ids = target_ids
        self._load_fusion(source)
        names = TensorNames()
        layer = next((name for name in _LAYER_NAMES if f"{name}.hidden_norm.weight" in source), _LAYER_NAMES[0])
        self._token_norm.load(source, f"{layer}.input_layernorm")
        self._state_norm.load(source, f"{layer}.hidden_norm")
        self._attention.load(source, names, layer)
        self._before_mlp.load(source, f"{layer}.post_attention_layernorm")
        self._mlp.load(source, [f"{layer}.{name}" for name in names.up], f"{layer}.{names.down}")
        self._load_ends(source)

    def _load_fusion(self, source: WeightSource) -> None:
        if "fc.bias" in source and source.stored("fc.bias") is not None:
            raise UnsupportedModelError("tensor fc.bias is not supported; fc has no bias")
        stored, width = source.stored("fc.weight"), self.spec.state_width
        count = len(self.spec.boundaries)
        if stored is not None and len(stored.shape) == 2 and stored.shape[1] != count * width:
            raise UnsupportedModelError(
                f"tensor fc.weight reads {stored.shape[1]} numbers, but the {count} layers that the config lists have "
                f"{count * width}"
            )
        self._fc.load(source, "fc")
        if self._all_streams_norm is not None:
            self._all_streams_norm.load(source, "input_norm")
        for number, norm in enumerate(self._stream_norms):
            norm.load(source, f"fc_norm.{number}")

    def _load_ends(self, source: WeightSource) -> None:
        spec = self.spec
        shares = spec.hidden_size == spec.state_width
        if source.stored("embed_tokens.weight") is not None:
            table = VocabEmbedding(spec.vocab_size, spec.hidden_size)
            table.load(source, "embed_tokens")
            self._embed = table
        elif not shares:
            raise UnsupportedModelError("tensor embed_tokens.weight is missing; the target's has another width")
        if "lm_head.weight" in source:
            self._lm_head.load(source, "norm", "lm_head", None)
            return
        if not shares or spec.draft_vocab_size != spec.vocab_size or spec.tied:
            raise UnsupportedModelError("tensor lm_head.weight is missing; the target's cannot take its place")
        self._norm.load(source, "norm")
        self._lm_head = self._target.head_after(self._norm)

    # --- forward ------------------------------------------------------------------------------------------------
    def fuse(self, streams: torch.Tensor) -> torch.Tensor:
        """Return states [T, hidden] of the target's streams side by side [T, n * width], which may be overwritten."""
        if self._all_streams_norm is not None:
            return self._fc(self._all_streams_norm(streams))
        if self._stream_norms:
            parts = streams.unflatten(1, (len(self._stream_norms), -1)).unbind(1)
            normed = [norm(part.contiguous()) for norm, part in zip(self._stream_norms, parts, strict=True)]
            streams = torch.cat(normed, -1)
        return self._fc(streams)

    def write(self, ids: torch.Tensor, states: torch.Tensor, step: StepContext) -> None:
        """Write K and V of a step's tokens. ids: [T]; states: [T, hidden], those of the positions before."""
        self._attention.write(step, self._inputs(ids, states)[0])

    def forward(self, ids: torch.Tensor, states: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Return the residual stream [T, hidden] after the layer, and write K and V. Arguments as for `write`; the
        states may be overwritten.
        """
        inputs, residual = self._inputs(ids, states)
        x = self._attention(step, None, inputs, residual)
        return self._mlp(self._before_mlp, x, x)

    def _inputs(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer reads [T, 2 * hidden], and its residual."""
        normed = self._state_norm(states)
        inputs = torch.cat((self._token_norm(self._embed(ids)), normed), -1)
        return inputs, normed if self.spec.norm_before_residual else states

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [L, draft vocabulary] for x [L, hidden] of `forward`."""
        return self._lm_head(x)

    def next_states(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states [L, hidden] that the next drafts are made from, for x of `forward`."""
        return self._norm(x) if self.spec.norm_output else x
