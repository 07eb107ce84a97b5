"""Shape and options of a model as read from its config; without torch."""

from dataclasses import dataclass

from roseinfer.attention.spec import AttentionSpec
from roseinfer.quant.fp8_scheme import Fp8Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Feed-forward layers in which a router chooses `top_k` of `count` experts for each token.

    width: size of each expert's hidden layer. renormalise: divide the weights of the chosen experts by their sum. The
    weights come from a softmax over all experts. dense_layers: layers with one ordinary feed-forward network instead,
    in ascending order.
    """

    count: int
    top_k: int
    width: int
    renormalise: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding.

    `scaling` is "default" (none), "linear" (positions divided by `factor`) or "llama3". The latter stretches by
    `factor` the wavelengths that are long compared with `original_max_position` tokens (see attention/heads.py).
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape and options of a decoder-only model.

    max_position: longest context in tokens. activation: "silu", "gelu" (exact) or "gelu_tanh". rope: None for learned
    positions. dtype: the checkpoint's. qk_norm: RMSNorm over each head of q and k. windows: attention window of each
    layer in tokens, None for full attention; empty if no layer has one. quantization: format of the checkpoint's linear
    layers, None for floats. experts: None if no layer has any; `intermediate_size` is that of the dense layers.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    activation: str
    rope: RopeSpec | None
    tied_embeddings: bool
    dtype: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    quantization: Fp8Scheme | None = None
    experts: ExpertsSpec | None = None

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Return the attention of each layer, in order."""
        return tuple(
            AttentionSpec(
                heads=self.num_heads,
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                window=window,
            )
            for window in self.windows or (None,) * self.num_layers
        )
