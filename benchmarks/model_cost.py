"""Bytes and operations of a step, from the model's shape: the yardstick for measured steps.

Counted are matrix products (a multiplication and an addition are two operations) and the bytes of weights and K/V.
Activations, norms, rotary embedding and sampling are left out, so a real step moves a little more.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.runner import ExpertChoice
from roseinfer.models.spec import ModelSpec


class Chunk(NamedTuple):
    """`count` tokens of one request from position `start`; the last `logits` of them need logits."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here
    logits: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one step or the sum of several: `tokens` computed, `kv_bytes` read and written.

    `expert_bytes`, `expert_flops`: the experts' part of `weight_bytes` and `linear_flops`.
    """

    tokens: int = 0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    linear_flops: float = 0.0
    attention_flops: float = 0.0
    expert_bytes: float = 0.0
    expert_flops: float = 0.0

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
            self.expert_bytes + other.expert_bytes,
            self.expert_flops + other.expert_flops,
        )


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Cost of a model. `layer_weights`, `head_weights`: elements of all layers' matrices and of the output head.

    `router_weights`: elements of all layers' routers; `expert_weights`: of one expert in each layer. Neither is part of
    `layer_weights`. `experts`: number that a token selects. `weight_itemsize`: bytes of a layer's element;
    `head_itemsize`: of the head and the routers, 0 for the same. `kv_token_bytes`: K and V of one token in all layers.
    `attention_width`: layers x query heads x head size.
    """

    layer_weights: int
    head_weights: int
    weight_itemsize: int
    kv_token_bytes: int
    attention_width: int
    head_itemsize: int = 0
    expert_weights: int = 0
    router_weights: int = 0
    experts: ExpertChoice | None = None

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        itemsize: int,
        *,
        layer_itemsize: int | None = None,
        kv_itemsize: int | None = None,
        head_itemsize: int | None = None,
    ) -> "ModelCost":
        """Build from a config, with elements of `itemsize` bytes unless smaller ones are given for layers, K/V or the
        head.

        The embedding is not counted, as a step reads only a few rows of it; nor are scales. Raises
        `UnsupportedModelError` for sliding windows, as every token is counted as visible to all later ones, and for
        layers with states.
        """
        if spec.deltas:
            raise UnsupportedModelError("what a step with recurrent states must read is not counted")
        if spec.windows:
            raise UnsupportedModelError("what a step with sliding windows must read is not counted")
        q_width = sum(layer.heads * layer.head_dim for layer in spec.attention)
        kv_width = sum(layer.kv_heads * layer.head_dim for layer in spec.attention)
        attention = spec.hidden_size * 2 * (q_width + kv_width)
        mlp = (3 if spec.gated else 2) * spec.hidden_size * spec.intermediate_size
        layers = attention + (spec.num_layers - spec.expert_layers) * mlp
        choice, expert, router = None, 0, 0
        if spec.experts is not None:
            choice = ExpertChoice(spec.experts.count, spec.experts.top_k)
            router = spec.expert_layers * spec.hidden_size * choice.count
            expert = spec.expert_layers * 3 * spec.hidden_size * spec.experts.width
        return cls(
            layer_weights=layers,
            head_weights=spec.hidden_size * spec.vocab_size,
            weight_itemsize=layer_itemsize or itemsize,
            kv_token_bytes=2 * kv_width * (kv_itemsize or itemsize),
            attention_width=q_width,
            head_itemsize=head_itemsize or itemsize,
            expert_weights=expert,
            router_weights=router,
            experts=choice,
        )

    def work(self, chunks: Iterable[Chunk]) -> Work:
        """Return the work of one step. A chunk reads its context's K/V once; position p attends to p + 1 tokens."""
        tokens = logits = kv_tokens = attended = 0
        for start, count, wanted in chunks:
            tokens += count
            logits += wanted
            kv_tokens += start + 2 * count
            attended += count * start + count * (count + 1) // 2
        return self.counted(tokens, logits, kv_tokens, attended)

    def counted(self, tokens: int, logits: int, kv_tokens: int, attended: int) -> Work:
        """Return the work from sums over chunks: tokens whose K/V is read or written, pairs of query and key.

        Assumes that tokens select experts independently and uniformly.
        """
        if not tokens:
            return Work()
        other_itemsize = self.head_itemsize or self.weight_itemsize
        read = self.layer_weights * self.weight_itemsize + self.router_weights * other_itemsize
        if logits:
            read += self.head_weights * other_itemsize
        expert_bytes = expert_flops = 0.0
        if self.experts is not None:
            expert_bytes = self.expert_weights * self.weight_itemsize * self.experts.read(tokens)
            expert_flops = 2.0 * self.expert_weights * self.experts.top_k * tokens
        others = (self.layer_weights + self.router_weights) * tokens + self.head_weights * logits
        return Work(
            tokens,
            read + expert_bytes,
            float(kv_tokens * self.kv_token_bytes),
            2.0 * others + expert_flops,
            4.0 * self.attention_width * attended,
            expert_bytes,
            expert_flops,
        )
