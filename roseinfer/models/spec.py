"""Shape and options of a model as read from its config; without torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.quant.scheme import QuantScheme
from roseinfer.state.delta_spec import DeltaSpec

# Parts of checkpoints that are left out.
VISION_TOWER, MTP_HEAD = "vision tower", "multi-token prediction head"
# RMSNorm of queries and keys: of each head, before or after its rotation, or of the whole projection (OLMo 2).
QkNorm = Literal["head", "head_after_rotation", "projection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """Feed-forward layers in which a router chooses `top_k` of `count` experts for each token.

    width: size of each expert's hidden layer. renormalise: divide the weights of the chosen experts by their sum. The
    weights come from a softmax over all experts. dense_layers: layers with one ordinary feed-forward network instead,
    in ascending order. activation: of a gated network, as in `Epilogue`; None for the model's. bias: the router and the
    experts' matrices have biases. shared_width: of the hidden layer of one more expert, which computes every token and
    has a gate of its own; None without one.
    """

    count: int
    top_k: int
    width: int
    renormalise: bool
    dense_layers: tuple[int, ...] = ()
    activation: str | None = None
    bias: bool = False
    shared_width: int | None = None


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
    """Mixer of tokens in one layer: attention, or the gated delta rule. rope: rotary position embedding before
    attention; None without rotation.
    """

    attention: AttentionSpec | None = None
    rope: RopeSpec | None = None
    delta: DeltaSpec | None = None

    @property
    def head_dim(self) -> int:
        """Width of the heads of attention."""
        assert self.attention is not None, "the layer has no attention"
        return self.attention.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape and options of a decoder-only model. Which norms a layer has, its family's `TensorNames` say.

    max_position: longest context in tokens. learned_positions: a table of them is added to the embedding. activation:
    "silu", "gelu" (exact) or "gelu_tanh". gated: the feed-forward network multiplies by a gate. parallel: attention and
    feed-forward network read the same norm, and both are added. output_gate: what attention gives is multiplied by the
    sigmoid of a gate, which the queries' projection has after each head. dtype: the checkpoint's. quantization: format
    of the checkpoint's linear layers, None for floats. experts: None if no layer has any; `intermediate_size` is that
    of the dense layers. Multipliers: of the embedding (rounded: to the dtype that is computed in), of what each part
    adds to the residual stream, and of the logits. logit_cap: logits become cap * tanh(logit / cap). tied_embeddings:
    the head is the embedding's table; None if the checkpoint stores no head. left_out: parts of the checkpoint that are
    not loaded, such as `VISION_TOWER`. overflows_float16: activations of published models exceed its range.
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
    output_gate: bool = False
    embedding_multiplier: float = 1.0
    embedding_multiplier_rounded: bool = False
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    quantization: QuantScheme | None = None
    experts: ExpertsSpec | None = None
    overflows_float16: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def expert_layers(self) -> int:
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """Attention of each layer that has one, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def deltas(self) -> tuple[DeltaSpec, ...]:
        """Gated delta rule of each layer that has one, in order. Such layers keep states."""
        return tuple(layer.delta for layer in self.layers if layer.delta is not None)

    def index_in_kind(self, layer: int) -> int:
        """Return a layer's index among the layers with attention, or among those with states."""
        has_attention = self.layers[layer].attention is not None
        return sum((other.attention is not None) == has_attention for other in self.layers[:layer])

    def state_bytes(self, dtype: str, row_drafts: int = 0) -> int:
        """Return the bytes of a sequence's states in all layers of a model that computes in `dtype`.

        row_drafts: most drafts of a row.
        """
        return sum(delta.state(dtype, row_drafts).bytes_per_slot for delta in self.deltas)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer with attention in tokens, None for full attention; empty if none has one."""
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
