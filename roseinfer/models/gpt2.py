"""GPT-2 (Radford et al., 2019): LayerNorm before each part, learned positions, GELU."""

import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_scales import KVScales
from roseinfer.layers.linear import MLP, LayerNorm
from roseinfer.models.decoder import SelfAttention, TensorNames
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.base import Build, WeightSource


class GPT2Block:
    def __init__(self, spec: ModelSpec, layer: int) -> None:
        heads = HeadTransform(spec.attention[layer])
        norm = LayerNorm(spec.hidden_size, spec.norm_eps)
        self._attention = SelfAttention(norm, spec.hidden_size, layer, heads, qkv_bias=True, out_bias=True)
        norm = LayerNorm(spec.hidden_size, spec.norm_eps)
        self._mlp = MLP(norm, spec.hidden_size, spec.intermediate_size, spec.activation)

    @property
    def kv_scales(self) -> KVScales | None:
        return self._attention.kv_scales

    def load(self, source: WeightSource, prefix: str) -> None:
        """Load the block. The checkpoint's Conv1D layers hold [in, out], so they are read transposed."""
        attention = f"{prefix}.attn"
        qkv, out = (f"{attention}.c_attn",), f"{attention}.c_proj"
        self._attention.load(source, f"{prefix}.ln_1", qkv, out, transposed=True)
        self._mlp.load(source, f"{prefix}.ln_2", f"{prefix}.mlp.c_fc", f"{prefix}.mlp.c_proj", transposed=True)

    def __call__(self, x: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        return self._mlp(self._attention(x, attention))


class GPT2:
    """Family of `GPT2LMHeadModel`."""

    # Old checkpoints carry the causal mask as a tensor.
    ignored: tuple[str, ...] = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        self._spec = spec

    def norm(self) -> LayerNorm:
        return LayerNorm(self._spec.hidden_size, self._spec.norm_eps)

    def block(self, layer: int) -> GPT2Block:
        return GPT2Block(self._spec, layer)

    def names(self, source: WeightSource) -> TensorNames:
        # Checkpoints on the hub have no prefix; transformers saves one.
        prefix = "transformer." if "transformer.wte.weight" in source else ""
        return TensorNames(tokens=f"{prefix}wte", positions=f"{prefix}wpe", block=prefix + "h.{}", norm=f"{prefix}ln_f")
