"""What a step must read and compute, from the model's shape: the yardstick for how near a measured step comes.

Counted are matrix products (a multiplication and an addition are two operations) and the bytes of weights and K/V;
activations, norms, rotary embedding and sampling are left out, so a real step moves a little more.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.experts import ExpertChoice
from roseinfer.models.config import ModelSpec


class Chunk(NamedTuple):
    """`count` tokens of one request, from position `start`; the last `logits` of them want logits."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here
    logits: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """Of one step, or of several added up. `tokens` computed; `kv_bytes` read and written."""

    tokens: int = 0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    linear_flops: float = 0.0
    attention_flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> float:
        return self.linear_flops + self.attention_flops

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens + other.tokens,
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.linear_flops + other.linear_flops,
            self.attention_flops + other.attention_flops,
        )


@dataclass(frozen=True, slots=True)
class ModelCost:
    """`layer_weights`, `head_weights`: numbers in the matrices of all layers, and in the output head.

    `expert_weights`: numbers in one expert of each layer, which are not among `layer_weights`; `experts`: how many of
    them tokens choose.
    `weight_itemsize`: bytes of a layer's number; `head_itemsize`: of the head's, 0 for the same. `kv_token_bytes`: K
    and V of one token in all layers. `attention_width`: layers x query heads x head size.
    """

    layer_weights: int
    head_weights: int
    weight_itemsize: int
    kv_token_bytes: int
    attention_width: int
    head_itemsize: int = 0
    expert_weights: int = 0
    experts: ExpertChoice | None = None

    @classmethod
    def of(
        cls, spec: ModelSpec, itemsize: int, *, layer_itemsize: int | None = None, kv_itemsize: int | None = None
    ) -> "ModelCost":
        """Weights and K/V of `itemsize` bytes a number, those of layers and K/V of fewer if so said.

        The embedding is not counted, as a step reads a few rows of it, nor are scales. Raises `UnsupportedModelError`
        for a model with sliding windows: every token is counted as seen by all later.
        """
        if spec.windows:
            raise UnsupportedModelError("what a step with sliding windows must read is not counted")
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention = spec.hidden_size * (q_width + 2 * kv_width) + q_width * spec.hidden_size
        gated = spec.rope is not None  # every family with rotary positions has a gated MLP, GPT-2 has neither
        mlp = (3 if gated else 2) * spec.hidden_size * spec.intermediate_size
        layers = spec.num_layers * attention + (spec.num_layers - spec.expert_layers) * mlp
        choice, expert = None, 0
        if spec.experts is not None:
            choice = ExpertChoice(spec.experts.count, spec.experts.top_k)
            layers += spec.expert_layers * spec.hidden_size * choice.count  # routers
            expert = spec.expert_layers * 3 * spec.hidden_size * spec.experts.width
        return cls(
            layer_weights=layers,
            head_weights=spec.hidden_size * spec.vocab_size,
            weight_itemsize=layer_itemsize or itemsize,
            kv_token_bytes=2 * spec.num_layers * kv_width * (kv_itemsize or itemsize),
            attention_width=spec.num_layers * q_width,
            head_itemsize=itemsize,
            expert_weights=expert,
            experts=choice,
        )

    def work(self, chunks: Iterable[Chunk]) -> Work:
        """Of one step. A chunk reads its context's K/V once; position p attends to p + 1 tokens, causally."""
        tokens = logits = kv_tokens = attended = 0
        for start, count, wanted in chunks:
            tokens += count
            logits += wanted
            kv_tokens += start + 2 * count
            attended += count * start + count * (count + 1) // 2
        return self.counted(tokens, logits, kv_tokens, attended)

    def counted(self, tokens: int, logits: int, kv_tokens: int, attended: int) -> Work:
        """The same from sums over the chunks: tokens whose K/V is read or written, pairs of query and key.

        Experts are read as by tokens that choose independently of each other, and all experts alike.
        """
        if not tokens:
            return Work()
        read: float = self.layer_weights * self.weight_itemsize
        used = self.layer_weights
        if self.experts is not None:
            read += self.expert_weights * self.weight_itemsize * self.experts.read(tokens)
            used += self.expert_weights * self.experts.top_k
        if logits:
            read += self.head_weights * (self.head_itemsize or self.weight_itemsize)
        return Work(
            tokens,
            float(read),
            float(kv_tokens * self.kv_token_bytes),
            2.0 * (used * tokens + self.head_weights * logits),
            4.0 * self.attention_width * attended,
        )
