"""Shape and options of an EAGLE-3 head as read from its folder; without torch."""

from dataclasses import dataclass

from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.spec import LayerSpec, ModelSpec, NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec:
    """Head for one target model.

    boundaries: target layers whose incoming residual streams the head reads, in ascending order; the number of layers
    stands for the stream after the last one. state_width: width of a stream. draft_vocab_size: tokens that the head can
    draft, of the target's `vocab_size`. tied: without a stored output matrix, it would be the embedding's table.

    norm_before_fc: one norm of all streams together; fc_norm: one of each. norm_before_residual: the layer's residual
    is the normalised state. norm_output: the next draft's state is the normalised result.
    """

    layer: LayerSpec
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    norm: NormSpec
    activation: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    boundaries: tuple[int, ...]
    state_width: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def attention(self) -> AttentionSpec:
        assert self.layer.attention is not None, "a head's layer has attention"
        return self.layer.attention

    def after(self, target: ModelSpec) -> ModelSpec:
        """Return a spec whose layers are the target's, then the head's. Their numbers are those of the KV store."""
        return ModelSpec(
            architecture="EAGLE-3",
            layers=(*target.layers, self.layer),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            max_position=target.max_position,
            norm=self.norm,
            activation=self.activation,
            tied_embeddings=False,
            dtype=target.dtype,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            mlp_bias=self.mlp_bias,
        )
