"""Bounds of the card on each row of the GPU table: the time of a perfect engine.

    python -m benchmarks.bounds [--models qwen3-8b ...] [--rows nano ...]

The engine of the bound has no host and no network. Each of its steps gives every running request a token and takes
prompts in order of arrival, up to a budget. A step takes as long as its matrix products (the weights read once, or the
arithmetic, whichever is longer) and then its attention (likewise, over the K/V). Of several budgets the best one
counts, for each figure apart. Two sets of rates, measured on one H200:

card: a device-to-device copy moves 4.27 TB/s, a bf16 product of 8192-cubed matrices does 711 TFLOP/s.
kernels: what libraries reach on such work: cuBLAS reads the weights of Qwen3-8B at 3.72 TB/s at batch 1, 3.64 at 16,
3.54 at 64 and 2.29 at 256; FlashInfer decodes at 3.90 TB/s and prefills at 496 TFLOP/s at best. Known for bf16 only.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from benchmarks.gpu_rows import FIGURES, MODELS, ROWS, Model, Row
from benchmarks.model_cost import Chunk, ModelCost, Work, seen_by_decodes, sum_of_contexts
from roseinfer.bench.arrivals import PlannedRequest, draw
from roseinfer.bench.report import percentile, table
from roseinfer.config.hub import model_folder
from roseinfer.core.config.engine import ModelConfig
from roseinfer.models.config import read_model_spec

BF16_BYTES = 2
# Prompt tokens per step.
BUDGETS = (128, 512, 2048, 8192, 1 << 40)


@dataclass(frozen=True)
class Rates:
    """Rates of a card. `weight_points`: (tokens in the step, bytes of weights read per second), linear in
    log(tokens).
    """

    name: str
    weight_points: tuple[tuple[int, float], ...]
    kv_bytes_s: float
    matrix_flops_s: float
    attention_flops_s: float

    def weight_bytes_s(self, tokens: int) -> float:
        points = self.weight_points
        for (few, slow), (many, fast) in pairwise(points):
            if tokens <= many:
                share = max(0.0, math.log(tokens / few) / math.log(many / few))
                return slow + share * (fast - slow)
        return points[-1][1]

    def step_s(self, work: Work) -> float:
        reading = work.weight_bytes / self.weight_bytes_s(work.tokens)
        products = max(reading, work.linear_flops / self.matrix_flops_s)
        return products + max(work.kv_bytes / self.kv_bytes_s, work.attention_flops / self.attention_flops_s)


CARD = Rates("card", ((1, 4.27e12),), 4.27e12, 711e12, 711e12)
# FP8 products (cuBLASLt, one scale per row, 8192 x 24576 x 4096), 23 November 2026.
FP8_FLOPS_S = 1_538e12
KERNELS = Rates("kernels", ((1, 3.72e12), (16, 3.64e12), (64, 3.54e12), (256, 2.29e12)), 3.90e12, 711e12, 496e12)


@dataclass(slots=True)
class Life:
    """Simulated request. `context` tokens have K/V; `missing` prompt tokens do not."""

    at_s: float
    context: int
    missing: int
    output_len: int
    first_s: float = 0.0
    last_s: float = 0.0


class Contexts:
    """Sum of the contexts of running requests, each bounded by a window. All grow by a token a step."""

    def __init__(self, window: int | None) -> None:
        self._bound = math.inf if window is None else window - 1
        self.total = 0
        self._growing = 0
        self._full_at: Counter[float] = Counter()  # step -> requests whose context reaches the bound after it

    def add(self, context: int, step: int) -> None:
        """Add a request that decodes from the step after `step` on."""
        self._change(1, context, step)

    def remove(self, context: int, step: int) -> None:
        """Remove a request that has grown to `context` in this step."""
        self._change(-1, context, step)

    def grow(self, step: int) -> None:
        self.total += self._growing
        self._growing -= self._full_at.pop(step, 0)

    def _change(self, sign: int, context: int, step: int) -> None:
        self.total += sign * int(min(context, self._bound))
        if context < self._bound:
            self._growing += sign
            self._full_at[step + self._bound - context] += sign


class PerfectEngine:
    """Engine that steps through a load. All running requests decode in every step, so only number and contexts
    matter.
    """

    def __init__(self, cost: ModelCost, rates: Rates, budget: int, load: Sequence[PlannedRequest], shared: int) -> None:
        """shared: length of the prefix of all prompts, which all but the first request find cached."""
        self._cost, self._rates, self._budget = cost, rates, budget
        self._pending = [Life(p.at_s, 0, len(p.prompt_ids), p.output_len) for p in load]
        if shared:
            for life in self._pending[1:]:
                life.context = min(shared, life.missing - 1)  # one token is computed for its logits
                life.missing -= life.context
        self._shared = shared > 0
        self._waiting: list[Life] = []
        self._ends: dict[int, list[Life]] = {}  # step -> requests whose last token it computes
        self._running = self._step = 0
        self._contexts = [Contexts(window) for window in cost.kinds]
        self.now_s = 0.0
        self.lives = list(self._pending)
        self.gaps: list[tuple[float, int]] = []  # (seconds, number of requests that waited this long for a token)

    def run(self) -> None:
        while self._pending or self._waiting or self._running:
            arrived = [life for life in self._pending if life.at_s <= self.now_s]
            if not (arrived or self._waiting or self._running):
                self.now_s = self._pending[0].at_s
                continue
            self._waiting += arrived
            del self._pending[: len(arrived)]
            self._one_step()

    def _one_step(self) -> None:
        decodes = self._running
        chunks = list(self._take_prompts())
        prefill = self._cost.work(Chunk(life.context, count, count == life.missing) for life, count in chunks)
        seen = [seen_by_decodes(decodes, contexts.total) for contexts in self._contexts]
        decode = self._cost.counted(decodes, decodes, seen, rows=decodes)
        work = prefill + decode
        if prefill.tokens and decodes:  # the weights are read once for both
            read = self._cost.counted(work.tokens, decodes)
            work = replace(work, weight_bytes=read.weight_bytes, expert_bytes=read.expert_bytes)
        duration_s = self._rates.step_s(work)
        self.now_s += duration_s
        self._step += 1
        if decodes:
            self.gaps.append((duration_s, decodes))
            for contexts in self._contexts:
                contexts.grow(self._step)
        self._finish()
        for life, count in chunks:
            self._computed(life, count)

    def _take_prompts(self) -> Iterator[tuple[Life, int]]:
        """Return (request, prompt tokens) in order of arrival, up to the budget."""
        room = self._budget
        for life in self._waiting:
            if room <= 0:
                return
            count = min(life.missing, room)
            room -= count
            yield life, count
            if self._shared and life is self.lives[0]:
                return  # later requests wait for the prefix that this one caches

    def _computed(self, life: Life, count: int) -> None:
        life.context += count
        life.missing -= count
        if life.missing:
            return
        self._waiting.remove(life)
        life.first_s = life.last_s = self.now_s
        if life.output_len > 1:
            self._running += 1
            for contexts in self._contexts:
                contexts.add(life.context, self._step)
            self._ends.setdefault(self._step + life.output_len - 1, []).append(life)

    def _finish(self) -> None:
        for life in self._ends.pop(self._step, ()):
            life.last_s = self.now_s
            self._running -= 1
            for contexts in self._contexts:
                contexts.remove(life.context + life.output_len - 1, self._step)

    def figures(self) -> dict[str, float]:
        """Return the figures of a client that takes no time itself."""
        lives = self.lives
        ttft = [1e3 * (life.first_s - life.at_s) for life in lives]
        tpot = [1e3 * (life.last_s - life.first_s) / max(1, life.output_len - 1) for life in lives]
        wall_s = max(life.last_s for life in lives) - min(life.at_s for life in lives)
        values = (
            sum(life.output_len for life in lives) / wall_s,
            *(percentile(ttft, p) for p in (50, 99)),
            *(percentile(tpot, p) for p in (50, 99)),
            1e3 * weighted_percentile(self.gaps, 99),
        )
        return dict(zip(FIGURES, values, strict=True))


def weighted_percentile(values: Sequence[tuple[float, int]], p: float) -> float:
    """Return the smallest value that at least p percent of the weight does not exceed."""
    ordered = sorted(values)
    needed, seen = sum(weight for _, weight in ordered) * p / 100, 0
    for value, weight in ordered:
        seen += weight
        if seen >= needed:
            return value
    return math.nan


@cache
def model_cost(name: str) -> ModelCost:
    """Return the cost of a model of the table, from its packaged config."""
    model = MODELS[name]
    spec = read_model_spec(model_folder(ModelConfig(model=model.hub_id, load_format="dummy")))
    return ModelCost.of(
        spec,
        BF16_BYTES,
        layer_itemsize=model.weight_bytes,
        kv_itemsize=model.kv_bytes,
        head_itemsize=model.head_bytes,
        expert_itemsize=model.expert_bytes,
    )


def all_rates(name: str) -> tuple[Rates, ...]:
    """Return the rates that bound a model of the table."""
    model = MODELS[name]
    card = replace(CARD, matrix_flops_s=FP8_FLOPS_S) if model.weight_bytes == 1 else CARD
    if model.gpus > 1:  # each GPU has its part of everything; communication is free
        kv_bytes_s, attention_flops_s = model.gpus * card.kv_bytes_s, model.gpus * card.attention_flops_s
        points = tuple((tokens, model.gpus * rate) for tokens, rate in card.weight_points)
        card = Rates(card.name, points, kv_bytes_s, model.gpus * card.matrix_flops_s, attention_flops_s)
    dense = model.gpus == 1 and model.weight_bytes == BF16_BYTES and model_cost(name).experts is None
    return (card, KERNELS) if dense else (card,)


def simulate(
    cost: ModelCost, rates: Rates, budget: int, load: Sequence[PlannedRequest], shared: int = 0
) -> dict[str, float]:
    engine = PerfectEngine(cost, rates, budget, load, shared)
    engine.run()
    return engine.figures()


def bound(row: Row, rates: Rates, seed_shift: int = 0) -> dict[str, float]:
    """Return the best of all budgets, figure by figure."""
    config = row.load(seed_shift)
    load = draw(config)
    shared = max(len(planned.prompt_ids) for planned in load) if config.same_prompt else config.shared_prefix
    tried = [simulate(model_cost(row.model), rates, budget, load, shared) for budget in BUDGETS]
    best = {figure: max if figure == "output_tok_s" else min for figure in FIGURES}
    return {figure: best[figure](figures[figure] for figures in tried) for figure in FIGURES}


def total_work(cost: ModelCost, load: Sequence[PlannedRequest]) -> dict[str, Work]:
    """Return the work of `prefill` (prompts one by one) and `decode` (all tokens after the first, without weights)."""
    prefill = decode = Work()
    for planned in load:
        prompt, outputs = len(planned.prompt_ids), planned.output_len - 1
        prefill += cost.work([Chunk(0, prompt)])
        contexts = [sum_of_contexts(prompt, outputs, window) for window in cost.kinds]
        seen = [seen_by_decodes(outputs, total) for total in contexts]
        decode += cost.counted(outputs, outputs, seen, rows=outputs)
    return {"prefill": prefill, "decode": decode}


def all_bounds(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return row key -> name of the rates -> figure -> bound."""
    return {row.key: {rates.name: bound(row, rates) for rates in all_rates(row.model)} for row in rows}


def chosen(models: Sequence[str] | None, rows: Sequence[str] | None) -> list[Row]:
    """Return the rows of these models, in the models' order, and of these names; None for all."""
    order = list(models or MODELS)
    found = [row for row in ROWS if row.model in order and (not rows or row.name in rows)]
    return sorted(found, key=lambda row: order.index(row.model))


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all")
    parser.add_argument("--rows", nargs="+", choices=sorted({row.name for row in ROWS}), help="default: all")


def _describe(model: Model) -> str:
    cost = model_cost(model.name)
    weights = cost.counted(1, 1).weight_bytes / 1e9
    return (
        f"{model.name}: {weights:.2f} GB of weights a step, {cost.whole_kv_token_bytes / 1024:.0f} KiB of K/V a token"
    )


def _shown(row: Row, name: str, figures: Mapping[str, float]) -> dict[str, Any]:
    return {"row": row.key, "limit": name, **{FIGURES[figure]: value for figure, value in figures.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_choice(parser)
    parser.add_argument("--json", help="write the bounds to this file")
    args = parser.parse_args()
    rows = chosen(args.models, args.rows)
    found = all_bounds(rows)
    for name in dict.fromkeys(row.model for row in rows):
        print(_describe(MODELS[name]))
    for row in rows:
        work = total_work(model_cost(row.model), draw(row.load()))
        prefill, decode = work["prefill"], work["decode"]
        print(f"{row.key}: prompts {prefill.flops / 1e15:.2f} PFLOP, decoding {decode.kv_bytes / 1e12:.2f} TB of K/V")
    print(table([_shown(row, name, figures) for row in rows for name, figures in found[row.key].items()]))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
