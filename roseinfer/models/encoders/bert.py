"""BERT (Devlin et al., 2019): learned positions and segments, a norm after each part, exact GELU.

MiniLM and BGE are BERTs of other sizes. XLM-RoBERTa (xlm_roberta.py) differs in its positions and its head.
"""

from dataclasses import dataclass

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.spec import AttentionSpec
from roseinfer.layers.embedding import Embedding, VocabEmbedding
from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.linear import Linear, Split
from roseinfer.layers.norm import LayerNorm
from roseinfer.models.encoders.attention import RowAttention
from roseinfer.models.encoders.base import EncoderNetwork, PackedRows
from roseinfer.models.encoders.config_fields import read_score_head, read_shape
from roseinfer.models.encoders.layers import Dense
from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.models.fields import ConfigFields
from roseinfer.quant.base import Build, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class BertSpec(EncoderSpec):
    """first_position: row of the table of positions for a row's first token."""

    first_position: int = 0


def read_spec(fields: ConfigFields, architecture: str) -> BertSpec:
    return read_bert(fields, architecture, first_position=0)


def read_bert(fields: ConfigFields, architecture: str, *, first_position: int) -> BertSpec:
    """Return the spec of BERT or a relative whose positions begin at `first_position`."""
    fields.only("position_embedding_type", "absolute", hint="only learned positions are")
    # Sizes of a pooler that no published network has (they are in BERT's multilingual configs).
    for key in ("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"):
        fields.get(key)
    for key in ("pooler_size_per_head", "pooler_type"):
        fields.get(key)
    positions = fields.integer("max_position_embeddings", 512)
    if positions <= first_position:
        fields.refuse("max_position_embeddings", positions, f"the first position is {first_position}")
    return BertSpec(
        **read_shape(fields, architecture, "hidden_act"),
        max_length=positions - first_position,
        token_types=fields.integer("type_vocab_size", 2),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        head=read_score_head(fields, architecture, "cls"),
        first_position=first_position,
    )


def network(spec: BertSpec, build: Build) -> EncoderNetwork:
    return Bert(spec, "bert", TanhHead.of(spec, "bert.pooler.dense", "classifier"))


class Bert:
    """Network of BERT and its relatives."""

    # A buffer of old checkpoints, the unused pooler, and heads of other tasks.
    ignored: tuple[str, ...] = (
        r"(\w+\.)?embeddings\.position_ids",
        r"(\w+\.)?pooler\..*",
        r"(cls|lm_head|classifier)\..*",
    )

    def __init__(self, spec: BertSpec, prefix: str, head: "TanhHead | None") -> None:
        """prefix: of the network's tensors in checkpoints of other tasks; those of the bare network may have none."""
        self._spec, self._prefix, self._head = spec, prefix, head
        hidden = spec.hidden_size
        self._words = VocabEmbedding(spec.vocab_size, hidden)
        self._positions = Embedding(spec.max_length + spec.first_position, hidden)
        self._types = Embedding(spec.token_types, hidden)
        self._norm = LayerNorm(hidden, spec.norm_eps)
        self._blocks = [PostNormBlock(spec) for _ in range(spec.num_layers)]

    def load(self, source: WeightSource) -> None:
        named = f"{self._prefix}.embeddings.word_embeddings.weight" in source
        prefix = f"{self._prefix}." if named else ""
        self._words.load(source, f"{prefix}embeddings.word_embeddings")
        self._positions.load(source, f"{prefix}embeddings.position_embeddings")
        self._types.load(source, f"{prefix}embeddings.token_type_embeddings")
        self._norm.load(source, f"{prefix}embeddings.LayerNorm")
        for layer, block in enumerate(self._blocks):
            block.load(source, f"{prefix}encoder.layer.{layer}")
        if self._head is not None:
            self._head.load(source)

    def positions(self, rows: PackedRows) -> torch.Tensor:
        """Return each token's row [T] of the table of positions."""
        return rows.positions

    def forward(self, rows: PackedRows) -> torch.Tensor:
        types = torch.zeros_like(rows.input_ids[:1]) if rows.token_types is None else rows.token_types
        x = self._words(rows.input_ids) + self._types(types)
        x = self._norm.of_sum(self._positions(self.positions(rows)), x)
        attention = RowAttention(rows)
        for block in self._blocks:
            x = block(x, attention)
        return x

    def scores(self, pooled: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "this model has no head"
        return self._head(pooled)


class PostNormBlock:
    """x = norm(x + attention(x)), then x = norm(x + down(activation(up(x)))). All products have biases."""

    def __init__(self, spec: EncoderSpec) -> None:
        hidden, heads = spec.hidden_size, spec.num_heads
        attention = AttentionSpec(heads=heads, kv_heads=heads, head_dim=spec.head_dim, scale=spec.head_dim**-0.5)
        self._heads = HeadTransform(attention)
        self._qkv = Linear(hidden, hidden, hidden, hidden, split=Split.OUTPUTS, bias=True)
        self._out = Linear(hidden, hidden, split=Split.INPUTS, bias=True)
        self._attention_norm = LayerNorm(hidden, spec.norm_eps)
        self._feed_forward = FeedForward(hidden, spec.intermediate_size, spec.activation, gated=False, bias=True)
        self._norm = LayerNorm(hidden, spec.norm_eps)

    def load(self, source: WeightSource, prefix: str) -> None:
        attention = f"{prefix}.attention"
        self._qkv.load(source, *(f"{attention}.self.{part}" for part in ("query", "key", "value")))
        self._out.load(source, f"{attention}.output.dense")
        self._attention_norm.load(source, f"{attention}.output.LayerNorm")
        self._feed_forward.load(source, [f"{prefix}.intermediate.dense"], f"{prefix}.output.dense")
        self._norm.load(source, f"{prefix}.output.LayerNorm")

    def __call__(self, x: torch.Tensor, attention: RowAttention) -> torch.Tensor:
        """Return the next hidden states. x: [T, hidden], which may be overwritten."""
        x = self._attention_norm.of_sum(self._out(attention(self._qkv(x), self._heads)), x)
        return self._norm.of_sum(self._feed_forward(None, x, None), x)


class TanhHead:
    """out(tanh(dense(x))): scores [R, labels] of the rows' first tokens [R, hidden]."""

    def __init__(self, hidden: int, labels: int, dense: str, out: str) -> None:
        """dense, out: names of the layers in the checkpoint."""
        self._names = (dense, out)
        self._dense = Dense(hidden, hidden)
        self._out = Dense(hidden, labels)

    @classmethod
    def of(cls, spec: EncoderSpec, dense: str, out: str) -> "TanhHead | None":
        return None if spec.head is None else cls(spec.hidden_size, spec.head.labels, dense, out)

    def load(self, source: WeightSource) -> None:
        self._dense.load(source, self._names[0])
        self._out.load(source, self._names[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._out(self._dense(x).tanh())
