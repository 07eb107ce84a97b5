"""Llama and its relatives Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped KV heads, gated MLP.

They differ in biases and in Qwen3's norm of q and k, which the spec states. Their tensors have the same names.
"""

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.heads import HeadTransform, Rotary, default_frequencies, linear_frequencies, llama3_frequencies
from roseinfer.attention.kv_scales import KVScales
from roseinfer.layers.linear import GatedMLP, RMSNorm
from roseinfer.models.decoder import FeedForward, SelfAttention, TensorNames
from roseinfer.models.spec import ModelSpec, RopeSpec
from roseinfer.quant.base import Build, WeightSource


class LlamaBlock:
    def __init__(self, spec: ModelSpec, layer: int, rotary: Rotary, feed_forward: FeedForward, part: str) -> None:
        """`part`: name of the feed-forward network in the checkpoint."""
        self._qk_norm = spec.qk_norm
        heads = HeadTransform(spec.attention[layer], rotary=rotary)
        norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._attention = SelfAttention(
            norm, spec.hidden_size, layer, heads, qkv_bias=spec.qkv_bias, out_bias=spec.o_bias
        )
        self._feed_forward = feed_forward
        self._part = part

    @property
    def kv_scales(self) -> KVScales | None:
        return self._attention.kv_scales

    def load(self, source: WeightSource, prefix: str) -> None:
        attention = f"{prefix}.self_attn"
        qkv = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        norms = (f"{attention}.q_norm", f"{attention}.k_norm") if self._qk_norm else None
        self._attention.load(source, f"{prefix}.input_layernorm", qkv, f"{attention}.o_proj", head_norms=norms)
        self._feed_forward.load(source, f"{prefix}.post_attention_layernorm", f"{prefix}.{self._part}")

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        return self._feed_forward(self._attention(x, attention))


class Llama:
    """Family of `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`."""

    part = "mlp"  # name of a block's feed-forward network in the checkpoint
    # Old checkpoints store the rotary frequencies, which follow from the config.
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        assert spec.rope is not None
        self.spec = spec
        self._rotary = Rotary(_frequencies(spec.rope, spec.head_dim).to(build.device), spec.max_position)

    def norm(self) -> RMSNorm:
        return RMSNorm(self.spec.hidden_size, self.spec.norm_eps)

    def block(self, layer: int) -> LlamaBlock:
        return LlamaBlock(self.spec, layer, self._rotary, self.feed_forward(layer), self.part)

    def feed_forward(self, layer: int) -> FeedForward:
        spec = self.spec
        return GatedMLP(self.norm(), spec.hidden_size, spec.intermediate_size, spec.activation, bias=spec.mlp_bias)

    def names(self, source: WeightSource) -> TensorNames:
        # Embedders are often stored without their head, and then without the prefix.
        prefix = "model." if "model.embed_tokens.weight" in source else ""
        return TensorNames(tokens=f"{prefix}embed_tokens", block=prefix + "layers.{}", norm=f"{prefix}norm")


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
