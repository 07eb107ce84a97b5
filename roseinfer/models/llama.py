"""Llama and its relatives Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped KV heads, gated MLP.

They differ in biases and in Qwen3's norm of q and k, which the spec says; the tensors' names are the same.
"""

from dataclasses import replace

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadNorms, HeadTransform
from roseinfer.layers.embedding import Embedding
from roseinfer.layers.linear import Linear, NormedLinear
from roseinfer.layers.lm_head import LMHead
from roseinfer.layers.mlp import GatedMLP
from roseinfer.layers.norm import RMSNorm
from roseinfer.layers.rotary import Rotary, default_frequencies, linear_frequencies, llama3_frequencies
from roseinfer.layers.weights import WeightSource
from roseinfer.models.config import ModelSpec, RopeSpec


class SelfAttention:
    def __init__(self, spec: ModelSpec, layer: int, rotary: Rotary) -> None:
        self._layer = layer
        self._spec = spec
        self._heads = HeadTransform(spec.attention[layer], rotary=rotary)
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._qkv = NormedLinear(norm, Linear(spec.hidden_size, q_width, kv_width, kv_width, bias=spec.qkv_bias))
        self._out = Linear(q_width, spec.hidden_size, bias=spec.o_bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        attention = f"{prefix}.self_attn"
        names = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        self._qkv.load(source, f"{prefix}.input_layernorm", *names)
        self._out.load(source, f"{attention}.o_proj")
        if self._spec.qk_norm:
            spec = self._heads.spec
            shape = (spec.heads, spec.kv_heads, spec.head_dim, self._spec.norm_eps)
            norms = HeadNorms.load(source, f"{attention}.q_norm", f"{attention}.k_norm", *shape)
            self._heads = replace(self._heads, norms=norms)

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """x: [T, hidden], the residual stream."""
        return self._out(attention.forward(self._layer, self._qkv(x), self._heads), x)


class LlamaBlock:
    def __init__(self, spec: ModelSpec, layer: int, rotary: Rotary) -> None:
        self._attention = SelfAttention(spec, layer, rotary)
        norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._mlp = GatedMLP(norm, spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        self._attention.load(source, prefix)
        self._mlp.load(source, f"{prefix}.post_attention_layernorm", f"{prefix}.mlp")

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """x: [T, hidden], which may be overwritten."""
        return self._mlp(self._attention(x, attention))


class Llama:
    """`LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`."""

    # Old checkpoints carry the rotary frequencies as a tensor; they follow from the config.
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.attention = spec.attention
        self._tokens = Embedding(spec.vocab_size, spec.hidden_size)
        assert spec.rope is not None
        rotary = Rotary(_frequencies(spec.rope, spec.head_dim).to(device), spec.max_position)
        self._blocks = [LlamaBlock(spec, layer, rotary) for layer in range(spec.num_layers)]
        norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._head = LMHead(norm, spec.hidden_size, spec.vocab_size, tied=spec.tied_embeddings)

    def load(self, source: WeightSource) -> None:
        self._tokens.load(source, "model.embed_tokens")
        for layer, block in enumerate(self._blocks):
            block.load(source, f"model.layers.{layer}")
        self._head.load(source, "model.norm", "lm_head", self._tokens)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        x = self._tokens(batch.input_ids)
        for block in self._blocks:
            x = block(x, attention)
        return x

    @property
    def padded_vocab(self) -> int:
        return self._head.padded_vocab

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._head(hidden, out)


def _frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    if rope.scaling == "linear":
        return linear_frequencies(head_dim, rope.theta, rope.factor)
    if rope.scaling == "llama3":
        return llama3_frequencies(
            head_dim,
            rope.theta,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_position=rope.original_max_position,
        )
    return default_frequencies(head_dim, rope.theta)
