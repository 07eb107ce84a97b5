"""How many experts of a layer a decode step really reads, beside the number that the bounds and the cost model take.

    python -m benchmarks.experts_read MODEL [--rows 1,8,64,256] [--device cuda] [--steps N] [--json FILE]

MODEL: a folder or an id, whose weights are dummies as in the GPU table: a router that likes a few experts would make
every figure of that table too good. Requests of 32 random tokens decode greedily; in their steps the router of every
layer is asked once more, in float32, which experts it chooses. Ends with 1 if the mean over layers and steps is more
than 5% below E (1 - (1 - k / E) ** rows) somewhere. No graphs are captured, so times mean nothing.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from roseinfer.bench.report import table
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import Core
from roseinfer.engine.llm import make_engine_config
from roseinfer.engine.messages import Add
from roseinfer.engine.process import build_engine
from roseinfer.hub import model_folder
from roseinfer.layers.experts import RoutedExperts
from roseinfer.quant.each_expert import route

PROMPT = 32
FIRST_ID = 10
LEAST_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Counted:
    """`layers`: of each layer with experts, the mean number of them that a step with so many rows reads."""

    rows: int
    steps: int
    layers: list[float]
    expected: float

    @property
    def mean(self) -> float:
        return fmean(self.layers)

    @property
    def sound(self) -> bool:
        return self.mean >= LEAST_SHARE * self.expected

    def as_row(self) -> dict[str, Any]:
        share = self.mean / self.expected
        return {
            "rows": self.rows,
            "experts read": f"{self.mean:.1f}",
            "expected": f"{self.expected:.1f}",
            "share": f"{share:.3f}",
            "least, most of a layer": f"{min(self.layers):.1f}, {max(self.layers):.1f}",
            "": "" if self.sound else "TOO FEW: figures do not count",
        }


@contextmanager
def watched(tokens: int, seen: dict[RoutedExperts, list[int]]) -> Iterator[None]:
    """Of every layer, how many experts each step of so many tokens chooses."""
    call = RoutedExperts.__call__

    def count(self: RoutedExperts, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == tokens:
            shape = self._shape
            router = self._experts._router.to(torch.float32)  # type: ignore[attr-defined]
            ids, _ = route(self._norm(x), router, shape.top_k, renormalise=shape.renormalise)
            seen.setdefault(self, []).append(int(ids.unique().numel()))
        return call(self, x)

    RoutedExperts.__call__ = count  # type: ignore[method-assign]
    try:
        yield
    finally:
        RoutedExperts.__call__ = call  # type: ignore[method-assign]


def count_experts(core: Core, info: EngineInfo, rows: int, steps: int, seed: int = 0) -> Counted:
    """Of decode steps with so many rows. Their prompts are computed in steps of another size, which do not count."""
    assert info.experts is not None, "a model with experts"
    rng = random.Random(seed)
    seen: dict[RoutedExperts, list[int]] = {}
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    for number in range(rows):
        prompt = [rng.randrange(FIRST_ID, info.vocab_size) for _ in range(PROMPT)]
        core.add(Add(f"{rows} {number}", prompt, params))
    while any(request.num_outputs == 0 for request in core.scheduler.roster.requests.values()):
        core.step()
    with watched(rows, seen):
        while core.busy:
            core.step()
    counts = list(seen.values())
    return Counted(rows, len(counts[0]), [fmean(layer) for layer in counts], info.experts.read(rows))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def start(model: str, most_rows: int, steps: int, **options: Any) -> tuple[Core, EngineInfo]:
    """An engine in this process that has room for so many requests. `options` as those of `LLM`."""
    room = {"max_num_seqs": most_rows, "num_kv_blocks": 8 * most_rows + 64, "max_model_len": 2 * PROMPT + steps}
    room |= {"max_num_batched_tokens": most_rows * PROMPT + 1}
    eager = {"load_format": "dummy", "enforce_eager": True, "overlap": False}
    config = make_engine_config(model=model, **eager, **room, **options)
    return build_engine(config, model_folder(config.model))


def main() -> int:
    args = parse_args()
    rows = [int(part) for part in args.rows.split(",")]
    core, info = start(args.model, max(rows), args.steps, device=args.device, dtype=args.dtype, seed=args.seed)
    if info.experts is None:
        sys.exit(f"{args.model} has no experts")
    found = [count_experts(core, info, each, args.steps, args.seed) for each in rows]
    core.close()
    print(
        f"{Path(args.model).name}: {info.experts.top_k} of {info.experts.count} experts for a token, {args.steps} steps"
    )
    print(table([each.as_row() for each in found]))
    if args.json is not None:
        whole = [{"rows": each.rows, "read": each.mean, "expected": each.expected} for each in found]
        args.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if all(each.sound for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
