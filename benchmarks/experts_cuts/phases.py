"""What `experts_cuts` does in turn: the defaults of all, then better cuts of tiles, of the router, of few tokens.

A cell is one product, or layer, of one kind of weights at one number of tokens. All cells take a step of their search
together, so that what they need is compiled on all cores at once.
"""

import gc
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.experts_cuts.bench import Bench, Call, OutOfTimeError, warm_up
from benchmarks.experts_cuts.cells import FewCell, ManyCell
from benchmarks.experts_cuts.grid import ROUTE
from benchmarks.experts_cuts.size import Plan
from roseinfer.kernels.experts_tiles import add_experts, spread


def steps(bench: Bench, cells: Sequence[Any], count: int) -> None:
    """So many steps of the cells' searches."""
    for cell in cells:
        cell.prepare()
    for _ in range(count):
        wanted = [(cell, cut) for cell in cells for cut in cell.search.wanted()[: bench.plan.most_cuts]]
        bench.compile([partial(cell.launch, cut) for cell, cut in wanted])
        for cell, cut in wanted:
            cell.search.times[cut] = cell.measure(cut)


def measure_defaults(few: Sequence[FewCell], many: Sequence[ManyCell], again: str = "") -> None:
    for few_cell in few:
        few_cell.measure_config(few_cell.default, again)
    for cell in many:
        cell.measure(cell.default, again)


def compile_defaults(bench: Bench, few: Sequence[FewCell], many: Sequence[ManyCell]) -> None:
    """And what sorts and copies rows for every way of the searches."""
    launches: list[Call] = [partial(cell.call, cell.default, cell.case.layer, cell.case.x) for cell in few]
    launches += [partial(cell.call, cell.default, cell.case.layer) for cell in many]
    tiles = sorted({part.way.tile for cell in many for part in cell.gate_up})
    launches += [partial(cell.case.order, tile) for cell, tile in product(many, tiles)]
    launches += [partial(copy_rows, cell) for cell in many]
    launches += [partial(add_experts, cell.parts, cell.top_k, cell.residual) for cell in many]
    bench.compile(launches)


def copy_rows(cell: ManyCell) -> None:
    spread(cell.case.rows, cell.case.order(cell.default.tile), cell.top_k)


def search_few(bench: Bench, cells: Sequence[FewCell], count: int) -> None:
    steps(bench, cells, count)
    for cell in cells:
        cell.search_down()
    steps(bench, cells, count)
    for cell in cells:
        cell.finish()
    turned = [(cell, replace(cell.config, evict_first=not cell.config.evict_first)) for cell in cells]
    bench.compile([partial(cell.call, config, cell.case.layer, cell.case.x) for cell, config in turned])
    for cell, config in turned:
        cell.measure_config(config)


def search_tiles(bench: Bench, cells: Sequence[ManyCell], count: int) -> None:
    steps(bench, [tiles for cell in cells for tiles in (*cell.gate_up, *cell.down)], count)
    found = [(cell, config) for cell in cells for config in cell.found()]
    bench.compile([partial(cell.call, config, cell.case.layer) for cell, config in found])
    for cell, config in found:
        cell.measure(config)


def search_router(bench: Bench, cells: Sequence[ManyCell]) -> None:
    cuts = [None, *ROUTE[: bench.plan.most_cuts]]
    bench.compile([partial(cell.measure_route, cut) for cell in cells for cut in cuts])
    for cell, cut in product(cells, cuts):
        cell.measure_route(cut)


def run_all(bench: Bench) -> None:
    """Ends with `OutOfTimeError` if it is."""
    plan, count = bench.plan, 1 if bench.plan.tiny else 2
    few = [FewCell(bench, kind, tokens) for tokens in plan.few for kind in plan.kinds]
    groups = [[ManyCell(bench, kind, tokens) for tokens in group for kind in plan.kinds] for group in plan.many]
    many = [cell for group in groups for cell in group]
    bench.say("inputs and references are there")
    compile_defaults(bench, few, many)
    measure_defaults(few, many)
    for cell in many:
        cell.measure_launches()
    for few_cell in few:
        few_cell.measure_logits()
    bench.say("defaults are known")
    if "route" in plan.parts:
        search_router(bench, many)
        bench.say("cuts of the router are known")
    for number, group in enumerate(groups if "tiles" in plan.parts else ()):
        search_tiles(bench, group, count)
        bench.say(f"cuts of tiles are known, {sorted({cell.tokens for cell in group})} tokens")
        if number == 0:  # the time may be over before the last of all
            measure_defaults(few, many, "again")
    if "few" in plan.parts:
        search_few(bench, few, count)
        bench.say("cuts of few tokens are known")
    measure_defaults(few, many, "again")


def work(plan: Plan, out: Path, until: float) -> None:
    """In the process that measures."""
    torch.manual_seed(0)
    with torch.inference_mode(), suppress(OutOfTimeError):
        if plan.tiny:
            run_all(Bench(plan, out, until))
            return
        gc.disable()
        with torch.cuda.stream(torch.cuda.Stream()):
            warm_up()
            run_all(Bench(plan, out, until))
