"""What `experts_cuts` measures: a cell is one product, or layer, of one kind of weights at one number of tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any

import torch

from benchmarks.experts_cuts.bench import Bench, Call, Key
from benchmarks.experts_cuts.grid import (
    FEW_DOWN,
    FEW_GATE_UP,
    FEW_GATE_UP_CODES,
    TILES_CODES,
    TILES_CODES_DOWN,
    TILES_WIDE,
    Search,
    Way,
    cut_fits,
    down_fits,
    gate_up_fits,
    start_cut,
    ways_of,
)
from benchmarks.experts_cuts.layer import RIGHT, WRONG, Error, Rows, error_of, run_many, widened
from roseinfer.kernels.experts_few import experts_few
from roseinfer.kernels.experts_few_configs import FewConfig, choose_few_config
from roseinfer.kernels.experts_order import Order, order_pairs, order_reference
from roseinfer.kernels.experts_tile_configs import Cut, ExpertsConfig, choose_experts_config
from roseinfer.kernels.experts_tiles import add_experts, down_product, gate_up_product, spread
from roseinfer.kernels.fp8_rows import Fp8Rows
from roseinfer.kernels.route import RouteCut, route, router_logits


class FewCell:
    """`experts_few`; a cut is that of one of its two products, the rest is `config`."""

    def __init__(self, bench: Bench, kind: str, tokens: int) -> None:
        self.bench, self.kind, self.tokens = bench, kind, tokens
        self.size, self.element = bench.plan.size, 1 if kind == "fp8" else 2
        scaled = "block" if kind == "fp8" else "none"
        self.default = choose_few_config(tokens, self.size.top_k, self.size.hidden, self.size.width, scaled)
        self.config = self.default
        self.case = bench.case(kind, tokens, round_rows=False)
        self.out = torch.empty_like(self.case.x)
        self.search_gate_up()

    @cached_property
    def draws(self) -> list[Any]:
        return self.bench.draws(self.kind, self.tokens)

    @cached_property
    def experts(self) -> float:
        return self.bench.experts_read(self.draws)

    def search_gate_up(self) -> None:
        axes = FEW_GATE_UP_CODES if self.kind == "fp8" else FEW_GATE_UP
        self.product = "gate_up"
        self.search = Search(self.config.gate_up, axes, self._gate_up_fits)

    def search_down(self) -> None:
        """From here on gate and up have the best cut that was found."""
        self.config, self.product = self.with_cut(self.search.best), "down"
        self.search = Search(self.config.down, FEW_DOWN, self._down_fits)

    def finish(self) -> None:
        self.config = self.with_cut(self.search.best)

    def _gate_up_fits(self, cut: Any) -> bool:
        return gate_up_fits(cut, self.size.hidden, self.size.width, self.element)

    def _down_fits(self, cut: Any) -> bool:
        return down_fits(cut, self.size.top_k, self.size.hidden, self.size.width, self.element)

    def with_cut(self, cut: Any) -> FewConfig:
        return replace(self.config, **{self.product: cut})

    def call(self, config: FewConfig, layer: Any, x: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"top_k": self.size.top_k, "renormalise": True, "residual": x, "out": self.out}
        return experts_few(x, layer.norm, layer.router, layer.weights, config=config, **options)

    def prepare(self) -> None:
        pass

    def launch(self, cut: Any) -> None:
        self.call(self.with_cut(cut), self.case.layer, self.case.x)

    def measure(self, cut: Any) -> float:
        return self.measure_config(self.with_cut(cut))

    def measure_logits(self) -> None:
        def check() -> Error:
            x, layer = self.case.x, self.case.layer
            wide = torch.nn.functional.rms_norm(x.float(), x.shape[1:], layer.norm.weight.float(), layer.norm.eps)
            return error_of(router_logits(x, layer.norm, layer.router)[0], wide @ layer.router.float().T)

        self.bench.measure(
            Key("logits", self.kind, self.tokens, "", ""),
            lambda: [partial(router_logits, x, layer.norm, layer.router) for layer, x in self.draws],
            check,
            default=True,
        )

    def measure_config(self, config: FewConfig, way: str = "") -> float:
        def check() -> Error:
            self.out.fill_(torch.nan)
            return error_of(self.call(config, self.case.layer, self.case.x), self.case.out)

        return self.bench.measure(
            Key("few", self.kind, self.tokens, way, str(config)),
            lambda: [partial(self.call, config, layer, x) for layer, x in self.draws],
            check,
            default=config == self.default,
            experts=self.experts,
        )


@dataclass
class TileCell:
    """A product in tiles, alone, with inputs as the reference has them."""

    bench: Bench
    kind: str
    tokens: int
    way: Way
    product: str

    def __post_init__(self) -> None:
        codes, size = self.kind == "fp8", self.bench.plan.size
        self.matrices, axes = (2, TILES_CODES) if self.product == "gate_up" else (1, TILES_CODES_DOWN)
        self.default = choose_experts_config(self.tokens, size.top_k, size.experts, size.width, codes=codes)
        ours = self.default.tile, self.default.weight_first
        start = start_cut(self.way, codes=codes)
        if (self.way.tile, self.way.weight_first) == ours:
            start = getattr(self.default, self.product)
        self.search = Search(start, axes if codes else TILES_WIDE, self._fits)
        self.case = self.bench.case(self.kind, self.tokens, round_rows=codes)

    def _fits(self, cut: Cut) -> bool:
        return cut_fits(cut, self.way, self.matrices, codes=self.kind == "fp8")

    @cached_property
    def order(self) -> Order:
        return self.case.order(self.way.tile)

    @cached_property
    def rows(self) -> Rows:
        if self.product == "down":
            return self.case.sorted_hidden(self.order)
        return spread(self.case.rows, self.order, self.bench.plan.size.top_k) if self.way.spread else self.case.rows

    def call(self, cut: Cut, layer: Any) -> Rows:
        config = ExpertsConfig(*self.way, cut, cut)
        if self.product == "gate_up":
            return gate_up_product(self.rows, layer.gate_up, self.order, self.bench.plan.size.top_k, "silu", config)
        return down_product(self.rows, layer.down, self.order, self.case.routed.weights, config, self.case.x.dtype)

    def launch(self, cut: Cut) -> None:
        self.call(cut, self.case.layer)

    def measure(self, cut: Cut) -> float:
        def check() -> Error:
            found = widened(self.call(cut, self.case.layer))
            if self.product == "down":
                return error_of(found, self.case.parts)
            return error_of(found, widened(self.case.hidden_rows)[self.order.pairs.long()])

        layers = self.bench.layers(self.kind)
        return self.bench.measure(
            Key(self.product, self.kind, self.tokens, str(self.way), str(cut)),
            lambda: [partial(self.call, cut, layers[i % len(layers)]) for i in range(self.bench.calls(self.tokens))],
            check,
            codes=self.kind == "fp8",
            default=(Way(self.default.tile, self.default.weight_first, self.default.spread) == self.way)
            and cut == getattr(self.default, self.product),
        )

    def prepare(self) -> None:
        """What kernels have to write before others can be compiled: while they are, none runs."""
        _ = self.order, self.rows


class ManyCell:
    """The whole layer in tiles, and its launches alone."""

    def __init__(self, bench: Bench, kind: str, tokens: int) -> None:
        self.bench, self.kind, self.tokens = bench, kind, tokens
        size, self.codes = bench.plan.size, kind == "fp8"
        self.top_k, self.default = (
            size.top_k,
            choose_experts_config(tokens, size.top_k, size.experts, size.width, codes=self.codes),
        )
        self.case = bench.case(kind, tokens, round_rows=self.codes)
        self.residual = torch.zeros_like(self.case.x)
        ways = ways_of(tokens * size.top_k / size.experts, codes=self.codes)
        own = Way(self.default.tile, self.default.weight_first, self.default.spread)
        ways = [own, *(way for way in ways if way != own)][: bench.plan.most_cuts]
        self.gate_up = [TileCell(bench, kind, tokens, way, "gate_up") for way in ways]
        shared = dict.fromkeys(way._replace(spread=own.spread) for way in ways)
        self.down = [TileCell(bench, kind, tokens, way, "down") for way in shared]

    @cached_property
    def experts(self) -> float:
        return self.bench.experts_read((layer, self.case.x) for layer in self.bench.layers(self.kind))

    def call(self, config: ExpertsConfig, layer: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        residual = self.residual if residual is None else residual
        return run_many(layer, self.case.x, residual, self.top_k, config, self.bench.arrived)

    def measure(self, config: ExpertsConfig, again: str = "") -> float:
        def check() -> Error:
            self.bench.arrived.zero_()  # whatever ran before
            return error_of(self.call(config, self.case.layer, self.case.x.clone()), self.case.out)

        layers = self.bench.layers(self.kind)
        return self.bench.measure(
            Key("many", self.kind, self.tokens, again, str(config)),
            lambda: [partial(self.call, config, layers[i % len(layers)]) for i in range(self.bench.calls(self.tokens))],
            check,
            codes=self.codes,
            default=config == self.default,
            experts=self.experts,
        )

    @cached_property
    def parts(self) -> torch.Tensor:
        """As `down_product` writes them."""
        return self.case.parts.to(self.case.x.dtype)

    def found(self) -> list[ExpertsConfig]:
        """By the products alone, the best three ways."""
        ranked: list[tuple[float, int, ExpertsConfig]] = []
        for gate_up in self.gate_up:
            way = gate_up.way
            down = next(cell for cell in self.down if cell.way[:2] == way[:2])
            times = [min(cell.search.times.values(), default=inf) for cell in (gate_up, down)]
            spread_us = self.bench.known("spread", self.kind, self.tokens) if way.spread else 0.0
            config = ExpertsConfig(*way, gate_up.search.best, down.search.best)
            ranked.append((sum(times) + spread_us, len(ranked), config))
        return [config for time, _, config in sorted(ranked)[:3] if time < inf]

    def measure_launches(self) -> None:
        """All but the products, which have their cells."""
        case, order = self.case, self.case.order(self.default.tile)
        experts = case.layer.router.shape[0]

        def check_order() -> Error:
            found, expected = self.case.order(order.tile), order_reference(case.routed.ids.cpu(), experts, order.tile)
            equal = torch.equal(found.pairs.cpu(), expected.pairs)
            return RIGHT if equal and torch.equal(found.tiles[1:].cpu(), expected.tiles[1:]) else WRONG

        def check_spread() -> Error:
            found = widened(spread(case.rows, order, self.top_k))
            return error_of(found, widened(case.rows)[order.pairs.long() // self.top_k])

        def repeated(call: Call) -> list[Call]:
            return [call] * self.bench.calls(self.tokens)

        alone: dict[str, tuple[Call, Callable[[], Error]]] = {
            "order": (partial(order_pairs, case.routed.ids, experts, order.tile), check_order),
            "spread": (partial(spread, case.rows, order, self.top_k), check_spread),
            "add": (
                partial(add_experts, self.parts, self.top_k, self.residual),
                lambda: error_of(add_experts(self.parts, self.top_k, case.x.clone()), case.out),
            ),
        }
        for part, (call, check) in alone.items():
            key = Key(part, self.kind, self.tokens, "", str(order.tile))
            self.bench.measure(key, partial(repeated, call), check, default=True)

    def measure_route(self, cut: Any) -> float:
        """`cut`: None for the router's own choice."""
        case, bench = self.case, self.bench
        chosen = None if cut is None else RouteCut(*cut)
        rows = torch.empty_like(case.x)
        normed: Rows = Fp8Rows.empty(case.x.shape[0], case.x.shape[1], True, case.x.device) if self.codes else rows

        def call(layer: Any) -> Any:
            return route(case.x, layer.norm, layer.terms, self.top_k, True, bench.arrived, normed, chosen)

        def check() -> Error:
            (normed.codes.view(torch.uint8) if isinstance(normed, Fp8Rows) else normed).fill_(127)
            bench.arrived.zero_()
            found = call(case.layer)
            if not torch.equal(found.ids.sort(1).values, case.routed.ids.sort(1).values):
                return WRONG
            shares = (routed.weights.sort(1).values for routed in (found, case.routed))
            errors = error_of(*shares), error_of(widened(normed), widened(case.rows))
            return Error(*torch.tensor(errors).amax(0).tolist())

        layers = bench.layers(self.kind)
        key = Key("route", self.kind, self.tokens, "", "default" if cut is None else str(cut))
        if bench.compiling:
            call(case.layer)
            return inf
        calls = [partial(call, layers[i % len(layers)]) for i in range(bench.calls(self.tokens))]
        return bench.measure(key, lambda: calls, check, default=cut is None)
