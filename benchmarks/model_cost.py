"""Bytes and operations of a step, from the model's shape: the yardstick for measured steps.

Counted are matrix products (a multiplication and an addition are two operations) and the bytes of weights and K/V.
Activations, norms, rotary embedding and sampling are left out, so a real step moves a little more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from roseinfer.attention.spec import AttentionSpec
from roseinfer.core.runner import ExpertChoice
from roseinfer.models.spec import ModelSpec

_DTYPES = {2: "bfloat16", 4: "float32"}


class Chunk(NamedTuple):
    """`count` tokens of one request from position `start`; the last `logits` of them need logits."""

    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here
    logits: int = 1


class Seen(NamedTuple):
    """Attention of a step's tokens in layers of one kind.

    kv_tokens: tokens whose K/V is read or written. attended: pairs of query and key.
    """

    kv_tokens: int
    attended: int


def seen_by_decodes(tokens: int, contexts: int) -> Seen:
    """Return what `tokens` decodes see. contexts: the sum of the tokens before each, bounded by its window."""
    return Seen(contexts + 2 * tokens, contexts + tokens)


def sum_of_contexts(start: int, count: int, window: int | None) -> int:
    """Return the number of keys that queries from position `start` on see before themselves, all together."""
    end = start + count
    bound = end if window is None else window - 1
    low, high = min(start, bound), min(end, bound)  # positions up to the bound see all keys
    return (high * (high - 1) - low * (low - 1)) // 2 + bound * (count - (high - low))


@dataclass(frozen=True, slots=True)
class WindowCost:
    """Cost of the layers with a window of `window` tokens; the other fields are those of `ModelCost`."""

    window: int
    kv_token_bytes: int
    attention_width: int


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
    `head_itemsize`: of the head and the routers, `expert_itemsize`: of experts, 0 for the same. `kv_token_bytes`: K and
    V of one token in the layers without a window. `attention_width`: of these layers, the sum of query heads x head
    size. `windows`: other layers. `state_bytes`: recurrent states of one row, which a step reads and writes;
    `state_width`: their numbers.
    """

    layer_weights: int
    head_weights: int
    weight_itemsize: float
    kv_token_bytes: int
    attention_width: int
    head_itemsize: int = 0
    expert_itemsize: float = 0.0
    expert_weights: int = 0
    router_weights: int = 0
    experts: ExpertChoice | None = None
    windows: tuple[WindowCost, ...] = ()
    state_bytes: int = 0
    state_width: int = 0

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        itemsize: int,
        *,
        layer_itemsize: float | None = None,
        kv_itemsize: int | None = None,
        head_itemsize: int | None = None,
        expert_itemsize: float | None = None,
    ) -> "ModelCost":
        """Build from a config, with elements of `itemsize` bytes unless smaller ones are given for layers, K/V, the
        head or experts.

        The embedding is not counted, as a step reads only a few rows of it; nor are scales.
        """
        q_width = sum(layer.heads * layer.head_dim for layer in spec.attention)
        kv_width = sum(layer.kv_heads * layer.head_dim for layer in spec.attention)
        deltas = sum(delta.channels + 2 * delta.values + 2 * delta.value_heads for delta in spec.deltas)
        attention = spec.hidden_size * (2 * (q_width + kv_width) + (q_width if spec.output_gate else 0) + deltas)
        mlp = (3 if spec.gated else 2) * spec.hidden_size * spec.intermediate_size
        layers = attention + (spec.num_layers - spec.expert_layers) * mlp
        choice, expert, router = None, 0, 0
        if spec.experts is not None:
            choice = ExpertChoice(spec.experts.count, spec.experts.top_k)
            router = spec.expert_layers * spec.hidden_size * choice.count
            expert = spec.expert_layers * 3 * spec.hidden_size * spec.experts.width
            if spec.experts.shared_width is not None:
                layers += spec.expert_layers * spec.hidden_size * (3 * spec.experts.shared_width + 1)
        kv_itemsize = kv_itemsize or itemsize
        by_window: dict[int | None, list[AttentionSpec]] = {None: []}
        for layer in spec.attention:
            by_window.setdefault(layer.window, []).append(layer)
        full, *windows = (
            WindowCost(window or 0, _kv_token_bytes(alike, kv_itemsize), _attention_width(alike))
            for window, alike in by_window.items()
        )
        return cls(
            layer_weights=layers,
            head_weights=spec.hidden_size * spec.vocab_size,
            weight_itemsize=layer_itemsize or itemsize,
            kv_token_bytes=full.kv_token_bytes,
            attention_width=full.attention_width,
            head_itemsize=head_itemsize or itemsize,
            expert_itemsize=expert_itemsize or 0.0,
            expert_weights=expert,
            router_weights=router,
            experts=choice,
            windows=tuple(windows),
            state_bytes=spec.state_bytes(_DTYPES[itemsize]) if spec.deltas else 0,
            state_width=sum(delta.value_heads * delta.key_dim * delta.value_dim for delta in spec.deltas),
        )

    @property
    def whole_kv_token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.kv_token_bytes + sum(layers.kv_token_bytes for layers in self.windows)

    def work(self, chunks: Iterable[Chunk]) -> Work:
        """Return the work of one step. A chunk reads its context's K/V once; position p attends to p + 1 tokens, or to
        those of its window.
        """
        chunks = list(chunks)
        tokens, logits = sum(chunk.count for chunk in chunks), sum(chunk.logits for chunk in chunks)
        return self.counted(tokens, logits, [_seen(chunks, window) for window in self.kinds], rows=len(chunks))

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """Windows of the layers, one for each `Seen` that `counted` takes: None, then those of `windows`."""
        return (None, *(layers.window for layers in self.windows))

    def counted(self, tokens: int, logits: int, seen: Sequence[Seen] = (), *, rows: int = 0) -> Work:
        """Return the work from sums over chunks. seen: one for each of `kinds`; without any, attention is left out.
        rows: those that read and write their states; the states' arithmetic is that of one token after the other.

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
            itemsize = self.expert_itemsize or self.weight_itemsize
            expert_bytes = self.expert_weights * itemsize * self.experts.read(tokens)
            expert_flops = 2.0 * self.expert_weights * self.experts.top_k * tokens
        others = (self.layer_weights + self.router_weights) * tokens + self.head_weights * logits
        kinds: list[ModelCost | WindowCost] = [self, *self.windows]
        alike = list(zip(seen, kinds, strict=True)) if seen else []
        return Work(
            tokens,
            read + expert_bytes,
            float(sum(part.kv_tokens * layers.kv_token_bytes for part, layers in alike) + 2 * rows * self.state_bytes),
            2.0 * others + expert_flops,
            4.0 * sum(part.attended * layers.attention_width for part, layers in alike)
            + (6.0 * self.state_width * tokens if rows else 0.0),
            expert_bytes,
            expert_flops,
        )


def _kv_token_bytes(layers: Sequence[AttentionSpec], itemsize: int) -> int:
    return 2 * itemsize * sum(layer.kv_heads * layer.head_dim for layer in layers)


def _attention_width(layers: Sequence[AttentionSpec]) -> int:
    return sum(layer.heads * layer.head_dim for layer in layers)


def _seen(chunks: Sequence[Chunk], window: int | None) -> Seen:
    kv_tokens = attended = 0
    for start, count, _ in chunks:
        kv_tokens += (start if window is None else min(start, window - 1)) + 2 * count
        attended += sum_of_contexts(start, count, window) + count
    return Seen(kv_tokens, attended)
