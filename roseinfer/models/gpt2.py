"""GPT-2 (Radford et al., 2019): LayerNorm before each part, learned positions, GELU."""

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadTransform
from roseinfer.layers.embedding import Embedding
from roseinfer.layers.linear import Linear, NormedLinear
from roseinfer.layers.lm_head import LMHead
from roseinfer.layers.mlp import MLP
from roseinfer.layers.norm import LayerNorm
from roseinfer.layers.weights import WeightSource
from roseinfer.models.config import ModelSpec


class GPT2Block:
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self._layer = layer
        self._heads = HeadTransform(spec.attention[layer])
        norm = LayerNorm(spec.hidden_size, spec.norm_eps)
        self._qkv = NormedLinear(norm, Linear(spec.hidden_size, 3 * spec.hidden_size, bias=True))
        self._out = Linear(spec.hidden_size, spec.hidden_size, bias=True)
        norm = LayerNorm(spec.hidden_size, spec.norm_eps)
        self._mlp = MLP(norm, spec.hidden_size, spec.intermediate_size, spec.activation)

    def load(self, source: WeightSource, prefix: str) -> None:
        """The checkpoint's Conv1D layers hold [in, out], so they are read transposed."""
        self._qkv.load(source, f"{prefix}.ln_1", f"{prefix}.attn.c_attn", transposed=True)
        self._out.load(source, f"{prefix}.attn.c_proj", transposed=True)
        self._mlp.load(source, f"{prefix}.ln_2", f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj", transposed=True)

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """x: [T, hidden], the residual stream, which may be overwritten."""
        x = self._out(attention.forward(self._layer, self._qkv(x), self._heads), x)
        return self._mlp(x)


class GPT2:
    """`GPT2LMHeadModel`."""

    # Old checkpoints carry the causal mask as a tensor.
    ignored: tuple[str, ...] = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.attention = spec.attention
        self._tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self._positions = Embedding(spec.max_position, spec.hidden_size)
        self._blocks = [GPT2Block(spec, layer) for layer in range(spec.num_layers)]
        norm = LayerNorm(spec.hidden_size, spec.norm_eps)
        self._head = LMHead(norm, spec.hidden_size, spec.vocab_size, tied=spec.tied_embeddings)

    def load(self, source: WeightSource) -> None:
        # The checkpoints on the hub leave the prefix out, those that transformers saves have it.
        prefix = "transformer." if "transformer.wte.weight" in source else ""
        self._tokens.load(source, f"{prefix}wte")
        self._positions.load(source, f"{prefix}wpe")
        for layer, block in enumerate(self._blocks):
            block.load(source, f"{prefix}h.{layer}")
        self._head.load(source, f"{prefix}ln_f", "lm_head", self._tokens)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        x = self._tokens(batch.input_ids) + self._positions(batch.positions)
        for block in self._blocks:
            x = block(x, attention)
        return x

    @property
    def padded_vocab(self) -> int:
        return self._head.padded_vocab

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._head(hidden, out)
