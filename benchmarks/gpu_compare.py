"""Compare variants of the server on one GPU: other source trees, other options, in alternating order.

    python -m benchmarks.gpu_compare --out DIR --cases "gpt2 hol" "gpt2 burst65" --variants new old@trees/5c3cde2
    python -m benchmarks.gpu_compare --out DIR --cases "gpt2 hol" --variants info "error=--log-level error" --together

A variant is NAME, NAME@TREE, NAME=ARGUMENTS or NAME@TREE=ARGUMENTS. TREE is a folder with a `roseinfer` package to
serve (`git archive COMMIT roseinfer | tar x -C TREE`; default: this one), ARGUMENTS are further ones of `roseinfer
serve`. A case is a row of the GPU table, or `six@RATE`: six classes of objectives at RATE requests per second.

Each of `--rounds` starts a server for each variant, in this order and then in the reverse one, and measures each case
`--runs` times. All variants get the same seeds. With `--together` all servers of a round run at once, share the card's
memory, and take turns for each run: for models that need little memory.

Prints, for each case and figure, each variant's median with its range, and the median and range of its ratio to the
first variant, run by run. Writes DIR/gpu-compare.json after every run.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_case import Case, models_of, start_server, warm_up
from benchmarks.gpu_rows import MEMORY_SHARE, MODELS
from benchmarks.gpu_server import Server, ServerError
from benchmarks.gpu_table import REPEAT_SHIFT, gpu, without_folders
from benchmarks.model_folders import write_folder
from roseinfer.bench.report import table

_VARIANT = re.compile(r"(?P<name>[\w.-]+)(@(?P<tree>[^=]+))?(=(?P<arguments>.+))?")
ERROR_TAIL = 300


@dataclass(frozen=True)
class Variant:
    name: str
    tree: Path | None = None
    arguments: str = ""

    @classmethod
    def parse(cls, text: str) -> "Variant":
        """Read NAME[@TREE][=ARGUMENTS]. Raises ValueError for anything else and for a tree without a package."""
        found = _VARIANT.fullmatch(text)
        if not found:
            raise ValueError(f"invalid variant '{text}' (expected NAME[@TREE][=ARGUMENTS])")
        tree = Path(found["tree"]).resolve() if found["tree"] else None
        if tree is not None and not (tree / "roseinfer").is_dir():
            raise ValueError(f"'{found['tree']}' holds no roseinfer package")
        return cls(found["name"], tree, found["arguments"] or "")


@dataclass(frozen=True)
class Run:
    """Figures of one case, of one variant; `number` pairs it with the same run of other variants."""

    variant: str
    case: str
    number: int
    figures: Mapping[str, float]


@dataclass
class Comparison:
    args: argparse.Namespace
    began_s: float = field(default_factory=time.monotonic)
    runs: list[Run] = field(default_factory=list)
    start_s: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began_s > float(self.args.time_limit)

    def measure_round(self, model: str, folder: Path, number: int) -> None:
        variants = self.args.variants[:: -1 if number % 2 else 1]
        if self.args.together:
            self._measure_servers(model, folder, number, variants)
            return
        for variant in variants:
            self._measure_servers(model, folder, number, [variant])

    def _measure_servers(self, model: str, folder: Path, number: int, variants: Sequence[Variant]) -> None:
        """Start a server for each variant, measure all cases of the model, and stop them."""
        if self.over:
            return
        servers: dict[Variant, Server] = {}
        cases = [case for case in self.args.cases if case.model == model]
        try:
            for position, variant in enumerate(variants, start=1):
                # A server's share includes what those before it hold, so they start one after the other.
                share = f"{float(MEMORY_SHARE) * position / len(variants):.3f}"
                log, options = self.args.out / f"{model}-{variant.name}.log", variant.arguments
                server = start_server(model, folder, log, server_args=options, tree=variant.tree, memory_share=share)
                servers[variant] = server
                if not self._begin(model, variant, server, cases):
                    server.stop()
                    del servers[variant]
            for run in range(self.args.runs):
                turn = number * self.args.runs + run
                for case in cases:
                    self._measure_case(case, turn, servers)
        finally:
            for server in servers.values():
                server.stop()

    def _begin(self, model: str, variant: Variant, server: Server, cases: Sequence[Case]) -> bool:
        """Return True once the server is warm; note an error and return False if it fails."""
        try:
            seconds = warm_up(server, model, cases, self.args.client)
        except ServerError as error:
            self._note(f"{model} {variant.name}: {error}\n" + "\n".join(server.tail()[-8:]))
            return False
        self.start_s.setdefault(f"{model} {variant.name}", []).append(round(seconds, 1))
        return True

    def _measure_case(self, case: Case, turn: int, servers: Mapping[Variant, Server]) -> None:
        for variant, server in list(servers.items())[:: -1 if turn % 2 else 1]:
            if self.over:
                return
            try:
                figures = case.measure(server, self.args.client, self.args.seed + REPEAT_SHIFT * turn)
            except (ServerError, LookupError, OSError) as error:
                self._note(f"{case.key} {variant.name}: {error}")
                continue
            self.runs.append(Run(variant.name, case.key, turn, figures))
            self.write()
            main = next(iter(figures))
            print(f"{self._elapsed()} {case.key} {variant.name} {turn}: {main} {figures[main]:.4g}", flush=True)

    def _note(self, error: str) -> None:
        print(f"FAILED {error}", flush=True)
        self.errors.append(error)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self.began_s:5.0f} s"

    def write(self) -> None:
        found = {
            "command": ["python", "-m", "benchmarks.gpu_compare", *map(without_folders, sys.argv[1:])],
            "hardware": gpu(),
            "start_s": self.start_s,
            "errors": self.errors,
            "runs": [vars(run) for run in self.runs],
        }
        (self.args.out / "gpu-compare.json").write_text(json.dumps(found, indent=1) + "\n")


def rows(runs: Sequence[Run], case: Case, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return a line for each figure and variant: median, range, and ratio to the first variant run by run."""
    found = []
    for figure, title in case.figures.items():
        base = {
            run.number: run.figures[figure] for run in runs if (run.variant, run.case) == (variants[0].name, case.key)
        }
        for variant in variants:
            own = [run for run in runs if (run.variant, run.case) == (variant.name, case.key)]
            values = [run.figures[figure] for run in own]
            pairs = [run.figures[figure] / base[run.number] for run in own if base.get(run.number)]
            found.append(
                {
                    "case": case.key,
                    "figure": title,
                    "variant": variant.name,
                    "runs": len(values),
                    "median": _shown(values, median),
                    "lowest": _shown(values, min),
                    "highest": _shown(values, max),
                    f"/ {variants[0].name}": f"{median(pairs):.3f}" if pairs else None,
                    "range": f"{min(pairs):.3f} to {max(pairs):.3f}" if pairs else None,
                }
            )
    return found


def _shown(values: Sequence[float], of: Any) -> str | None:
    return f"{of(values):,.4g}" if values else None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu-compare.json and the logs")
    parser.add_argument("--cases", nargs="+", required=True, help="as in 'gpt2 hol' or 'qwen3-8b six@35'")
    parser.add_argument("--variants", nargs="+", required=True, help="NAME[@TREE][=ARGUMENTS]; the first is the base")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each variant's server (default: 2)")
    parser.add_argument("--runs", type=int, default=1, help="of each case and start (default: 1)")
    parser.add_argument("--together", action="store_true", help="run the servers of a round at once")
    parser.add_argument("--seed", type=int, default=0, help="added to the seed of each case (default: 0)")
    parser.add_argument("--client", type=Path, help="another client's script")
    parser.add_argument("--models-dir", type=Path, help="model folders, instead of making them")
    parser.add_argument(
        "--time-limit", type=float, default=500, help="seconds after which no run starts (default: 500)"
    )
    args = parser.parse_args(argv)
    try:
        args.cases = [Case.parse(text) for text in args.cases]
        args.variants = [Variant.parse(text) for text in args.variants]
    except ValueError as error:
        parser.error(str(error))
    if len({variant.name for variant in args.variants}) < len(args.variants):
        parser.error("two variants have the same name")
    return args


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(args)
    with tempfile.TemporaryDirectory() as made:
        for model in models_of(args.cases):
            folder = args.models_dir / MODELS[model].folder if args.models_dir else write_folder(model, Path(made))
            for number in range(args.rounds):
                comparison.measure_round(model, folder, number)
    comparison.write()
    print(f"\n{gpu()}\nstart s: {comparison.start_s}")
    for case in args.cases:
        print(f"\n{table(rows(comparison.runs, case, args.variants))}")
    for error in comparison.errors:
        print(f"FAILED {error[:ERROR_TAIL]}")
    return 1 if comparison.errors else 0


if __name__ == "__main__":
    sys.exit(main())
