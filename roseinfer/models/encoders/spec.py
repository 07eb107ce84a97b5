"""Shape and options of an encoder as read from its config, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreHead:
    """Classifier of whole rows, as rerankers have.

    pooling: "cls" (the row's first token) or "mean" (of all its tokens). activation: of the scores, "sigmoid" or
    "identity".
    """

    labels: int
    pooling: str
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """Shape and options that all encoders share; a family adds its own.

    max_length: the most tokens of a row. token_types: kinds of segments that the model distinguishes, 1 if none.
    activation: as in `ModelSpec`. dtype: the checkpoint's. head: None for a model that embeds only.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    token_types: int
    norm_eps: float
    activation: str
    dtype: str
    head: ScoreHead | None
