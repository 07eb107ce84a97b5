"""Layers of experts with random weights, their inputs, and what should come out, in float32."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.experts_cuts.size import Size
from roseinfer.kernels.experts_few import ExpertWeights
from roseinfer.kernels.experts_order import Order, order_pairs
from roseinfer.kernels.experts_tile_configs import ExpertsConfig
from roseinfer.kernels.experts_tiles import Stack, add_experts, down_product, gate_up_product, spread
from roseinfer.kernels.fp8_codes import CODES, SCALE_BLOCK
from roseinfer.kernels.fp8_rows import Fp8Rows, rows_reference
from roseinfer.kernels.route import Routed, route, route_reference
from roseinfer.kernels.route_terms import RouterTerms, split_router
from roseinfer.kernels.skinny_linear import SkinnyNorm

EPS = 1e-6
# The least distance between the logit of the last expert that is chosen and that of the first that is not: with less,
# rounding decides.
CLEAR = 1e-3

Rows = torch.Tensor | Fp8Rows


@dataclass(frozen=True)
class Layer:
    """weights: of random numbers, in 16 bits or in FP8 with scales by blocks."""

    norm: SkinnyNorm
    router: torch.Tensor
    weights: ExpertWeights

    @property
    def codes(self) -> bool:
        return self.weights.gate_up_scales is not None

    @cached_property
    def terms(self) -> RouterTerms:
        return split_router(self.norm, self.router)

    @cached_property
    def gate_up(self) -> Stack:
        return Stack(self.weights.gate_up, self.weights.gate_up_scales)

    @cached_property
    def down(self) -> Stack:
        return Stack(self.weights.down, self.weights.down_scales)

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """gate_up and down of one expert, float32."""
        return tuple(_widened(stack, expert) for stack in (self.gate_up, self.down))  # type: ignore[return-value]


def _widened(stack: Stack, expert: int) -> torch.Tensor:
    weight = stack.weights[expert].float()
    if stack.scales is None:
        return weight
    return weight * stack.scales[expert].repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)


def make_layer(size: Size, kind: str, dtype: torch.dtype, device: torch.device) -> Layer:
    """`kind`: "bf16" for weights in `dtype`, "fp8" for codes."""
    norm = (torch.rand(size.hidden, device=device) + 0.5).to(dtype)
    router = (torch.randn(size.experts, size.hidden, device=device) * 2 / size.hidden**0.5).to(dtype)
    stacks = [
        _make_stack(size.experts, outs, columns, kind, dtype, device)
        for outs, columns in ((2 * size.width, size.hidden), (size.hidden, size.width))
    ]
    weights = ExpertWeights(stacks[0].weights, stacks[1].weights, stacks[0].scales, stacks[1].scales)
    return Layer(SkinnyNorm(norm, EPS), router, weights)


def _make_stack(experts: int, outs: int, columns: int, kind: str, dtype: torch.dtype, device: torch.device) -> Stack:
    if kind == "bf16":
        return Stack(torch.randn(experts, outs, columns, device=device, dtype=dtype) / columns**0.5)
    codes = torch.empty(experts, outs, columns, dtype=CODES, device=device)
    for of_expert in codes:
        of_expert.copy_((torch.randn(outs, columns, device=device) * 100).clamp(-448, 448))
    scales = 0.5 + torch.rand(experts, outs // SCALE_BLOCK, columns // SCALE_BLOCK, device=device)
    return Stack(codes, scales / 100 / columns**0.5)


def draw_tokens(tokens: int, layer: Layer, top_k: int) -> torch.Tensor:
    """[tokens, H], so small that a residual hides nothing, of which it is clear which experts they have."""
    hidden, weight = layer.router.shape[1], layer.norm.weight
    x = torch.randn(2 * tokens + 8, hidden, device=weight.device).to(weight.dtype) / 20
    logits = F.rms_norm(x.float(), weight.shape, weight.float(), EPS) @ layer.router.float().T
    if top_k < logits.shape[1]:
        first = logits.topk(top_k + 1, -1).values
        x = x[first[:, -2] - first[:, -1] > CLEAR]
    return x[:tokens].contiguous()


@dataclass(frozen=True)
class Case:
    """One layer's work for x [T, H], and what each launch should write.

    rows: norm(x), rounded as the kernels round it. hidden: [T * k, I] float32, of each pair in the order of tokens.
    parts: [T * k, H] float32, of `hidden` rounded. out: [T, H], their sum, with x.
    """

    layer: Layer
    x: torch.Tensor
    routed: Routed
    rows: Rows
    hidden: torch.Tensor
    hidden_rows: Rows
    parts: torch.Tensor

    @property
    def out(self) -> torch.Tensor:
        return self.x.float() + self.parts.view(*self.routed.ids.shape, -1).sum(1)

    def order(self, tile: int) -> Order:
        return order_pairs(self.routed.ids, self.layer.router.shape[0], tile)

    def sorted_hidden(self, order: Order) -> Rows:
        """`hidden_rows` where `order` has them."""
        return _taken(self.hidden_rows, order.pairs.long())


def make_case(layer: Layer, tokens: int, top_k: int, *, round_rows: bool) -> Case:
    """round_rows: to FP8, as the products in tiles do if weights are; else what is multiplied has 16 bits."""
    x = draw_tokens(tokens, layer, top_k)
    routed = route_reference(x, layer.norm, layer.router, top_k, True)
    norm = layer.norm.weight
    wide = F.rms_norm(x.float(), norm.shape, norm.float(), EPS)
    rows = rounded(wide, x.dtype, round_rows)
    hidden = torch.empty(tokens * top_k, layer.down.weights.shape[2], device=x.device)
    source = widened(rows)
    for expert, pairs in _of_experts(routed.ids):
        gate, up = (source[pairs // top_k] @ layer.of_expert(expert)[0].T).chunk(2, -1)
        hidden[pairs] = F.silu(gate) * up
    hidden_rows = rounded(hidden, x.dtype, round_rows)
    parts, source = torch.empty(tokens * top_k, x.shape[1], device=x.device), widened(hidden_rows)
    for expert, pairs in _of_experts(routed.ids):
        parts[pairs] = source[pairs] @ layer.of_expert(expert)[1].T
    parts *= routed.weights.view(-1, 1)
    return Case(layer, x, routed, rows, hidden, hidden_rows, parts)


def _of_experts(ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The pairs of each expert that has any."""
    flat = ids.flatten().long()
    counts = flat.bincount().tolist()
    for expert, pairs in enumerate(flat.argsort(stable=True).split(counts)):
        if len(pairs):
            yield expert, pairs


def rounded(wide: torch.Tensor, dtype: torch.dtype, codes: bool) -> Rows:
    return rows_reference(wide, grouped=True) if codes else wide.to(dtype)


def widened(rows: Rows) -> torch.Tensor:
    return rows.widen() if isinstance(rows, Fp8Rows) else rows.float()


def _taken(rows: Rows, which: torch.Tensor) -> Rows:
    if not isinstance(rows, Fp8Rows):
        return rows[which]
    taken = Fp8Rows.empty(len(which), rows.codes.shape[1], True, rows.codes.device)
    taken.codes.view(torch.uint8)[: len(which)] = rows.codes.view(torch.uint8)[which]
    taken.scales[: len(which)] = rows.scales[which]
    return taken


class Error(NamedTuple):
    """The norm of a difference by that of what was expected: of the row that is furthest off, and of all rows. NaN if
    there is any."""

    row: float
    whole: float

    def within(self, limit: "Error") -> bool:
        return self.row <= limit.row and self.whole <= limit.whole


RIGHT, WRONG = Error(0.0, 0.0), Error(torch.inf, torch.inf)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> Error:
    assert found.shape == expected.shape
    off, norms = (found.float() - expected).norm(dim=1), expected.norm(dim=1)
    return Error(float((off / norms).max()), float(off.norm() / norms.norm()))


def run_many(
    layer: Layer, x: torch.Tensor, residual: torch.Tensor, top_k: int, config: ExpertsConfig, arrived: torch.Tensor
) -> torch.Tensor:
    """All launches of a layer of many tokens, as `CudaExperts` makes them; the residual is overwritten."""
    rows: Rows = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if layer.codes:
        rows = Fp8Rows.empty(x.shape[0], x.shape[1], True, x.device)
    ids, weights = route(x, layer.norm, layer.terms, top_k, True, arrived, normed=rows)
    order = order_pairs(ids, layer.router.shape[0], config.tile)
    if config.spread:
        rows = spread(rows, order, top_k)
    h = gate_up_product(rows, layer.gate_up, order, top_k, "silu", config)
    return add_experts(down_product(h, layer.down, order, weights, config, x.dtype), top_k, residual)
