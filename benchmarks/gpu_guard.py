"""Guard of the GPU figures: a dozen rows in five minutes on one card, compared with the last committed figures.

    python -m benchmarks.gpu_guard --out DIR [--client FILE] [--models gpt2 ...] [--results DIR]

Run it when the scheduler, the runner or kernels have changed. It measures every row once, with the client and on the
kind of GPU that the committed figures name, and prints a table. Ends with 1 if a figure is worse than its bound, could
not be measured, or has no comparable committed figure. Writes DIR/gpu-guard.json.

Bounds come from the spread of equal commits on several machines, so a figure within its bound may still have become
worse: `gpu_compare` finds smaller differences, on one machine.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_case import HIGHER_IS_BETTER, Case, models_of, start_server, warm_up
from benchmarks.gpu_rows import MODELS
from benchmarks.gpu_server import Server, ServerError
from benchmarks.gpu_table import git_commit, gpu, without_folders
from benchmarks.model_folders import write_folder
from roseinfer.bench.report import table

RESULTS = Path(__file__).parent / "results"
START = "start_s"
OWN_CLIENT = "roseinfer bench serve"
LOG_LINES = 8  # of a server that failed


@dataclass(frozen=True)
class Check:
    """A figure that must not become worse by more than `tolerance`, as a share of the committed figure.

    `spread`: what the tolerance follows from, in words. `protects`: the part of the engine that the figure depends on.
    """

    case: Case
    figure: str
    tolerance: float
    spread: str
    protects: str

    def limit(self, reference: float) -> float:
        """Return the worst value that passes."""
        better = self.figure in HIGHER_IS_BETTER
        return reference * (1 - self.tolerance) if better else reference * (1 + self.tolerance)

    def passes(self, value: float, reference: float) -> bool:
        return value >= self.limit(reference) if self.figure in HIGHER_IS_BETTER else value <= self.limit(reference)


@dataclass(frozen=True)
class Reference:
    """A committed figure, and how it was measured."""

    value: float
    gpu: str
    client: str
    commit: str


def _checks(*lines: tuple[str, str, float, str, str]) -> tuple[Check, ...]:
    return tuple(
        Check(Case.parse(key), figure, share, spread, protects) for key, figure, share, spread, protects in lines
    )


CHECKS = _checks(
    ("gpt2 hol", "output_tok_s", 0.15, "34,200 to 40,000 on three machines", "host time of steps and of requests"),
    ("gpt2 burst65", "output_tok_s", 0.25, "TTFT p50 94 to 148 ms on three machines", "requests that arrive at once"),
    ("gpt2 burst65", "tpot_p99_ms", 0.50, "worst request of 512", "decoding rows beside a queue of prompts"),
    ("qwen3-0.6b nano", "output_tok_s", 0.05, "26,100 to 27,300 on five machines", "decode graphs of small models"),
    ("qwen3-8b seq1", "tpot_p50_ms", 0.03, "3.92 to 3.94 on three machines", "decode kernels of one row"),
    ("qwen3-8b nano", "output_tok_s", 0.04, "9,840 to 10,200 on four machines", "decode kernels of 256 rows"),
    ("qwen3-8b nano", "itl_p99_ms", 0.25, "53.8 to 56.0 on three machines", "length of steps in a burst of prompts"),
    ("qwen3-8b rag", "output_tok_s", 0.03, "3,985 and 4,004 on two machines", "prompt kernels, chunking"),
    ("qwen3-8b poisson", "tpot_p50_ms", 0.05, "6.19 and 6.24 on two machines", "mixed steps"),
    ("qwen3-8b poisson", "ttft_p99_ms", 0.20, "51.4 and 51.9 on two machines", "start of prompts beside decoding rows"),
    ("qwen3-8b six@35", "adherence", 0.04, ".793 to .819 at one commit on three machines", "slack, its cost model"),
    ("qwen3-8b-fp8 seq1", "tpot_p50_ms", 0.03, "2.46 and 2.47 on two machines", "products of FP8 weights"),
    ("qwen3-8b-fp8-kv nano", "output_tok_s", 0.03, "15,099 and 15,114 on two machines", "attention over FP8 K/V"),
)
# Seconds to the first 200 of /health, compared with the committed first start of the same model. A start depends on
# which kernels an earlier one compiled, so only a large difference counts.
START_TOLERANCE = 0.6
START_MODELS = ("gpt2", "qwen3-8b")


def checks(models: Sequence[str]) -> list[Check]:
    """Return the checks of these models, those of starts included."""
    starts = [
        Check(Case(name, "start"), START, START_TOLERANCE, "10.4 to 13.7 s", "model load, warm-up, capture of graphs")
        for name in START_MODELS
    ]
    return [check for check in (*CHECKS, *starts) if check.case.model in models]


def references(results: Path) -> dict[tuple[str, str], Reference]:
    """Return (case key, figure) -> the newest committed figure."""
    found: dict[tuple[str, str], Reference] = {}
    files = [json.loads(file.read_text()) for file in results.glob("*.json")]
    for result in sorted((file for file in files if "client" in file), key=lambda file: str(file["date"])):
        for key, figure, value in _figures(result):
            gpu_name, client = str(result["hardware"].get("gpu")), " ".join(result["client"])
            found[key, figure] = Reference(value, gpu_name, client, str(result["commit"]))
    return found


def _figures(result: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield case key, figure and value of a result of `gpu_table` or of `slo_gpu`."""
    for row in result.get("rows", []):
        for figure, value in row["figures"].items():
            if value is not None and row["error"] is None:
                yield f"{row['model']} {row['row']}", figure, value
    for name, server in result.get("servers", {}).items():
        if server["start_s"]:
            yield f"{name} start", START, server["start_s"][0]
    if result.get("load_name", "six") == "six":
        for point in result.get("points", []):
            if point["policy"] == "slack" and "adherence" in point:
                model = result.get("model", "qwen3-8b")
                yield f"{model} six@{point['rate']:g}", "adherence", point["adherence"]


def measure(args: argparse.Namespace, wanted: Sequence[Check], errors: list[str]) -> dict[tuple[str, str], float]:
    """Return (case key, figure) -> value, and add what failed to `errors`."""
    found: dict[tuple[str, str], float] = {}
    cases = list(dict.fromkeys(check.case for check in wanted if check.figure != START))
    with tempfile.TemporaryDirectory() as made:
        for model in models_of(cases):
            folder = args.models_dir / MODELS[model].folder if args.models_dir else write_folder(model, Path(made))
            server = start_server(model, folder, args.out / f"guard-{model}.log", server_args=args.server_args)
            own = [case for case in cases if case.model == model]
            try:
                found[f"{model} start", START] = warm_up(server, model, own, args.client)
                for case in own:
                    found |= _measure_case(args, case, server, errors)
            except ServerError as error:
                errors.append(f"{model}: {error}\n" + "\n".join(server.tail()[-LOG_LINES:]))
            finally:
                server.stop()
    return found


def _measure_case(
    args: argparse.Namespace, case: Case, server: Server, errors: list[str]
) -> dict[tuple[str, str], float]:
    try:
        figures = case.measure(server, args.client)
    except (ServerError, LookupError, OSError) as error:
        errors.append(f"{case.key}: {error}")
        return {}
    print(f"{time.monotonic() - args.began_s:5.0f} s {case.key}", flush=True)
    return {(case.key, name): value for name, value in figures.items()}


def verdict(check: Check, value: float | None, reference: Reference | None, gpu_name: str, client: str) -> str:
    """Return "ok", or why the check fails."""
    if reference is None:
        return "no committed figure"
    if reference.gpu != gpu_name:
        return f"not comparable: measured on {reference.gpu}"
    if reference.client != client:
        return f"not comparable: measured by {reference.client}"
    if value is None:
        return "not measured"
    return "ok" if check.passes(value, reference.value) else "WORSE"


def line(check: Check, value: float | None, reference: Reference | None, gpu_name: str, client: str) -> dict[str, Any]:
    """Return a line of the table."""
    return {
        "case": check.case.key,
        "figure": check.figure,
        "now": None if value is None else f"{value:,.4g}",
        "committed": None if reference is None else f"{reference.value:,.4g}",
        "bound": None if reference is None else f"{check.limit(reference.value):,.4g}",
        "at": None if reference is None else reference.commit[:12],
        "verdict": verdict(check, value, reference, gpu_name, client),
        "protects": check.protects,
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu-guard.json and the logs")
    parser.add_argument("--models", nargs="+", choices=models_of([check.case for check in CHECKS]), help="default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the committed figures")
    parser.add_argument("--client", type=Path, help="another client's script")
    parser.add_argument("--models-dir", type=Path, help="model folders, instead of making them")
    parser.add_argument("--server-args", default="", help="more arguments of `roseinfer serve`, in one word")
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    args.began_s = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = checks(args.models or models_of([check.case for check in CHECKS]))
    errors: list[str] = []
    measured, committed = measure(args, wanted, errors), references(args.results)
    hardware, client = gpu(), f"python {args.client.name}" if args.client else OWN_CLIENT
    lines = []
    for check in wanted:
        key = (check.case.key, check.figure)
        lines.append(line(check, measured.get(key), committed.get(key), hardware["gpu"], client))
    facts = {
        "command": ["python", "-m", "benchmarks.gpu_guard", *map(without_folders, sys.argv[1:])],
        "commit": git_commit(),
        "hardware": hardware,
        "client": client,
        "elapsed_s": round(time.monotonic() - args.began_s, 1),
        "errors": errors,
        "checks": lines,
    }
    (args.out / "gpu-guard.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"\n{hardware}, {client}, {facts['elapsed_s']} s\n{table(lines)}")
    for error in errors:
        print(f"FAILED {error}")
    return 0 if all(entry["verdict"] == "ok" for entry in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
