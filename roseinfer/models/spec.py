"""Shape and options of a model as read from its config; without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.quant.scheme import QuantScheme

# RMSNorm of queries and keys: of each head, before or after its rotation, or of the whole projection (OLMo 2).
QkNorm = Literal["head", "head_after_rotation", "projection"]


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
class NormSpec:
    """Norm over the last dimension. kind: "rms", or "layer" for LayerNorm. offset: added to the weights in float32 (1
    for checkpoints that store w for 1 + w). bias: a LayerNorm's.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Attention of one layer, and the rotary position embedding before it; None without rotation."""

    attention: AttentionSpec
    rope: RopeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape and options of a decoder-only model. Which norms a layer has, its family's `TensorNames` say.

    max_position: longest context in tokens. learned_positions: a table of them is added to the embedding. activation:
    "silu", "gelu" (exact) or "gelu_tanh". gated: the feed-forward network multiplies by a gate. parallel: attention and
    feed-forward network read the same norm, and both are added. dtype: the checkpoint's. quantization: format of the
    checkpoint's linear layers, None for floats. experts: None if no layer has any; `intermediate_size` is that of the
    dense layers. Multipliers: of the embedding (rounded: to the dtype that is computed in), of what each part adds to
    the residual stream, and of the logits.
    logit_cap: logits become cap * tanh(logit / cap). tied_embeddings: the head is the embedding's table; None if the
    checkpoint stores no head. left_out: parts of the checkpoint for other inputs, which are not loaded.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm: NormSpec
    activation: str
    tied_embeddings: bool | None
    dtype: str
    learned_positions: bool = False
    gated: bool = True
    parallel: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    embedding_multiplier: float = 1.0
    embedding_multiplier_rounded: bool = False
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    quantization: QuantScheme | None = None
    experts: ExpertsSpec | None = None
    left_out: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Attention of each layer, in order."""
        return tuple(layer.attention for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens, None for full attention; empty if no layer has one."""
        found = tuple(spec.window for spec in self.attention)
        return found if any(found) else ()


def uniform_layers(
    count: int,
    attention: AttentionSpec,
    rope: RopeSpec | None,
    windows: Sequence[int | None] = (),
    without_rope: Sequence[int] = (),
) -> tuple[LayerSpec, ...]:
    """Return `count` layers that differ in nothing but their windows (empty: none), and in whether they rotate."""
    windows = windows or (None,) * count
    return tuple(
        LayerSpec(attention=replace(attention, window=window), rope=None if layer in without_rope else rope)
        for layer, window in enumerate(windows)
    )
