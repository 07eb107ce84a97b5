"""Llama and its relatives Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped KV heads, gated MLP.

They differ in biases and in Qwen3's norm of q and k, which the spec says; the tensors' names are the same.
"""

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch
from roseinfer.layers.embedding import Embedding
from roseinfer.layers.linear import Linear
from roseinfer.layers.lm_head import LMHead
from roseinfer.layers.mlp import GatedMLP
from roseinfer.layers.norm import HeadNorm, RMSNorm
from roseinfer.layers.rotary import (
    Angles,
    Rotary,
    default_frequencies,
    linear_frequencies,
    llama3_frequencies,
    rotate,
)
from roseinfer.layers.weights import WeightSource
from roseinfer.models.config import ModelSpec, RopeSpec


class SelfAttention:
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._qkv = Linear(spec.hidden_size, q_width, kv_width, kv_width, bias=spec.qkv_bias)
        self._out = Linear(q_width, spec.hidden_size, bias=spec.o_bias)
        self._norm = None
        if spec.qk_norm:
            self._norm = HeadNorm(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.norm_eps)

    def load(self, source: WeightSource, prefix: str) -> None:
        self._qkv.load(source, f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
        self._out.load(source, f"{prefix}.o_proj")
        if self._norm is not None:
            self._norm.load(source, f"{prefix}.q_norm", f"{prefix}.k_norm")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, angles: Angles, attention: AttentionBackend
    ) -> torch.Tensor:
        """x, residual: [T, hidden]. Queries and keys are normed and turned together."""
        tokens = x.shape[0]
        rotated_heads = self._heads + self._kv_heads
        qkv = self._qkv(x).view(tokens, rotated_heads + self._kv_heads, self._head_dim)
        qk, v = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
        if self._norm is not None:
            qk = self._norm(qk)
        qk = rotate(qk, angles)
        attended = attention.forward(self._layer, qk[:, : self._heads], qk[:, self._heads :], v)
        return self._out(attended.reshape(tokens, -1), residual)


class LlamaBlock:
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self._norm_1 = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._attention = SelfAttention(spec, layer)
        self._norm_2 = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        self._norm_1.load(source, f"{prefix}.input_layernorm")
        self._attention.load(source, f"{prefix}.self_attn")
        self._norm_2.load(source, f"{prefix}.post_attention_layernorm")
        self._mlp.load(source, f"{prefix}.mlp")

    def __call__(self, x: torch.Tensor, angles: Angles, attention: AttentionBackend) -> torch.Tensor:
        """x: [T, hidden]."""
        x = self._attention(self._norm_1(x), x, angles, attention)
        return self._mlp(self._norm_2(x), x)


class Llama:
    """`LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`."""

    # Old checkpoints carry the rotary frequencies as a tensor; they follow from the config.
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self._tokens = Embedding(spec.vocab_size, spec.hidden_size)
        assert spec.rope is not None
        self._rotary = Rotary(_frequencies(spec.rope, spec.head_dim).to(device))
        self._blocks = [LlamaBlock(spec, layer) for layer in range(spec.num_layers)]
        self._norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._head = LMHead(spec.hidden_size, spec.vocab_size, tied=spec.tied_embeddings)

    def load(self, source: WeightSource) -> None:
        self._tokens.load(source, "model.embed_tokens")
        for layer, block in enumerate(self._blocks):
            block.load(source, f"model.layers.{layer}")
        self._norm.load(source, "model.norm")
        self._head.load(source, "lm_head", self._tokens)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        x = self._tokens(batch.input_ids)
        angles = self._rotary.angles(batch.positions)
        for block in self._blocks:
            x = block(x, angles, attention)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)


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
