"""Latency objectives on real execution: Qwen3-8B with dummy weights on one GPU, policies against loads, over real HTTP.

    python -m benchmarks.slo_gpu --out DIR [--load six] [--policies slack,fifo] [--rates 15,25] [--repeat N]
    python -m benchmarks.slo_gpu --show slo-h200.json [--plot FILE.png]

Each policy gets a server of its own, one after the other, and each rate its seconds of arrivals with prompts of its
own; requests are in classes of objectives and say so. Every policy sees the same requests.

`--load six`, the default: SCORPIO's six classes, 20 s at each rate. `--load long`: a tenth of the prompts has 8,000 to
30,000 tokens, 120 s at half of the capacity. `--load experts`: the six classes for Qwen3-30B-A3B. `--load MODEL`, for
the families of `FAMILIES`: the six classes with TPOT objectives of 2.0 and 3.3 times the model's lone step.

Good = both objectives kept; goodput = good requests over the wall time, the drain included; missed = served, but late.
`--model` names another model of `gpu_rows.MODELS` of the load's shape.
Prints a table with the peer's figures and the targets, and writes DIR/slo-gpu.json (slo-gpu-LOAD.json) after every run.
`--drafts-wrong` first records all outputs with fifo, which rejects none. Each policy then runs without and with drafts.
`--client FILE` measures with another client that takes `--slo` and `--send-slo` (default: `roseinfer bench serve`; only
that draws lengths by class); `--models-dir` and `--commit` as in gpu_table.py.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_rows import MEMORY_SHARE, MODELS
from benchmarks.gpu_server import Server, ServerError
from benchmarks.gpu_table import git_commit, gpu, torch_versions, without_folders
from benchmarks.model_folders import write_folder
from roseinfer.bench.report import host, table, versions
from roseinfer.sim.plot import plot_sweep

MODEL = "qwen3-8b"
LONG_WARM_UP = "--num 4 --in-len 16000 --out-len 32 --procs 2 --seed 987655"
WARM_UP = "--num 16 --in-len 256 --out-len 32 --procs 2 --seed 987654"
# vLLM 0.24.0 on one H200, which ignores objectives: rate -> (adherence, goodput in requests per second).
PEER: Mapping[float, tuple[float, float]] = {
    15: (0.933, 13.2),
    25: (0.484, 11.1),
    35: (0.070, 2.0),
    50: (0.001, 0.0),
    70: (0.000, 0.0),
}


@dataclass(frozen=True)
class Load:
    """Load. `classes`: name, share, TTFT and TPOT objectives in s, and optional lengths, as in the client's JSON.

    `rates`: requests per second, for `seconds` each. `targets`: model -> rate -> a figure of slack and its minimum.
    `model`: the default model; others of the same shape are allowed.
    """

    classes: Sequence[tuple[str, float, float, float, Mapping[str, int]]]
    rates: Sequence[float]
    seconds: int
    lengths: str
    max_model_len: int
    warm_ups: Sequence[str]
    targets: Mapping[str, Mapping[float, tuple[str, float]]]
    peer: Mapping[float, tuple[float, float]] = field(default_factory=dict)
    model: str = MODEL

    @property
    def models(self) -> list[str]:
        return [model.name for model in MODELS.values() if model.hub_id == MODELS[self.model].hub_id]

    @property
    def flags(self) -> str:
        return f"--workload poisson {self.lengths} --procs 8"

    @property
    def lengths_by_class(self) -> bool:
        return any(own for *_, own in self.classes)

    def class_list(self) -> list[dict[str, Any]]:
        """Return the classes as clients read them."""
        return [
            {
                "name": name,
                "share": share,
                "ttft": ttft_s,
                "tpot": tpot_s,
                "body": {"slo": {"ttft_ms": 1e3 * ttft_s, "tpot_ms": 1e3 * tpot_s}},
                **own,
            }
            for name, share, ttft_s, tpot_s, own in self.classes
        ]


SIXTH = round(1 / 6, 4)
SIX_LENGTHS = "--in-min 32 --in-len 1024 --out-min 16 --out-len 512"


def six(tight_s: float, loose_s: float) -> tuple[tuple[str, float, float, float, Mapping[str, int]], ...]:
    """Return SCORPIO's six classes (arXiv 2505.23022) in equal shares, with TTFT scaled to an H200 and these TPOT."""
    tight = [("c1", 0.13, tight_s), ("c2", 0.53, tight_s), ("c3", 0.8, tight_s)]
    loose = [("c4", 0.13, loose_s), ("c5", 0.27, loose_s), ("c6", 2.0, loose_s)]
    return tuple((name, SIXTH, ttft_s, tpot_s, {}) for name, ttft_s, tpot_s in tight + loose)


# A family's lone step in ms (docs/research/2026-11-families.md), and rates around its capacity.
FAMILIES: Mapping[str, tuple[float, Sequence[float]]] = {
    "gemma-3-27b": (13.7, (4, 8, 12)),
    "qwen3.6-27b-fp8": (7.94, (5, 10, 15)),
    "qwen3.6-35b-a3b-fp8": (2.12, (5, 10, 15)),
    "gpt-oss-20b": (1.79, (5, 10, 15)),
}
TIGHT_STEPS, LOOSE_STEPS = 2.0, 3.3  # TPOT objectives in lone steps


def family_load(model: str, lone_ms: float, rates: Sequence[float]) -> Load:
    """Return the six classes for `model`, whose step of one request takes `lone_ms`."""
    return Load(
        classes=six(round(TIGHT_STEPS * lone_ms / 1e3, 5), round(LOOSE_STEPS * lone_ms / 1e3, 5)),
        rates=rates,
        seconds=20,
        lengths=SIX_LENGTHS,
        max_model_len=4096,
        warm_ups=(WARM_UP,),
        targets={},
        model=model,
    )


LOADS = {
    "six": Load(
        classes=six(0.008, 0.013),
        rates=(15, 25, 35, 50, 70),
        seconds=20,
        lengths=SIX_LENGTHS,
        max_model_len=MODELS[MODEL].max_model_len,
        warm_ups=(WARM_UP,),
        targets={
            MODEL: {
                15: ("adherence", 0.99),
                25: ("adherence", 0.96),
                35: ("adherence", 0.87),
                50: ("adherence", 0.72),
                70: ("adherence", 0.58),
            },
            "qwen3-8b-fp8-kv": {
                25: ("adherence", 0.99),
                35: ("adherence", 0.95),
                50: ("goodput_req_s", 35),
                70: ("goodput_req_s", 42),
            },
        },
        peer=PEER,
    ),
    # The same for a model with experts, whose steps read more of them with more requests.
    "experts": Load(
        classes=six(0.012, 0.018),
        rates=(15, 25, 35),
        seconds=20,
        lengths=SIX_LENGTHS,
        max_model_len=4096,
        warm_ups=(WARM_UP,),
        targets={
            "qwen3-30b-a3b-fp8": {15: ("adherence", 0.95), 25: ("adherence", 0.80), 35: ("adherence", 0.60)},
        },
        model="qwen3-30b-a3b-fp8",
    ),
    # A tenth long prompts, at half of the capacity by the bound (`benchmarks.research.bound`), which a test computes.
    "long": Load(
        classes=(
            ("short", 0.9, 0.5, 0.008, {"in_min": 32, "in_len": 1024}),
            ("long", 0.1, 10.0, 0.02, {"in_min": 8000, "in_len": 30000}),
        ),
        rates=(1.7,),
        seconds=120,
        lengths="--out-min 16 --out-len 512",
        max_model_len=32768,
        warm_ups=(WARM_UP, LONG_WARM_UP),
        targets={MODEL: {1.7: ("adherence", 0.95)}},
    ),
    **{model: family_load(model, *known) for model, known in FAMILIES.items()},
}
POLICIES = {
    "slack": "--scheduling-policy slack",
    "fifo": "--scheduling-policy fifo",
    "sarathi": "--scheduling-policy sarathi",
    "qoserve": "--scheduling-policy qoserve",
    "scorpio": "--scheduling-policy scorpio",
    "scorpio-mixed": "--scheduling-policy scorpio --scorpio-mixed --scorpio-stagger --scorpio-eps 1.1",
}
KEPT = ("requests", "ok", "rejected", "failed", "adherence", "goodput_req_s", "classes")
TIMES = ("ttft_ms", "tpot_ms", "itl_ms")


def run_client(args: argparse.Namespace, server: Server, flags: Iterable[str], *, objectives: bool) -> dict[str, Any]:
    """Return the client's summary. Raises `ServerError` if it ends without one."""
    load = LOADS[args.load]
    command = [sys.executable, "-m", "roseinfer.cli", "bench", "serve"]
    names = ("--slo-classes", "--send-objectives")
    if args.client:
        command, names = [sys.executable, str(args.client)], ("--slo", "--send-slo")
    with tempfile.TemporaryDirectory() as folder:
        file, classes = Path(folder, "client.json"), Path(folder, "classes.json")
        classes.write_text(json.dumps(load.class_list()))
        command += ["--url", server.url, "--model", args.model, *flags, "--json", str(file)]
        if objectives:
            command += [names[0], f"@{classes}" if args.client else str(classes), names[1]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=160 + load.seconds)
        if not file.is_file():
            raise ServerError(f"the client ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        summary = dict(json.loads(file.read_text())["summary"])
    return {**summary, **summary.get("slo", {})}


def measure(args: argparse.Namespace, server: Server, rate: float, seed: int) -> dict[str, Any]:
    load = LOADS[args.load]
    number = round(load.seconds * rate)
    flags = [*shlex.split(load.flags), "--rate", f"{rate:g}", "--num", str(number), "--seed", str(seed)]
    summary = run_client(args, server, flags, objectives=True)
    quantiles = {name: {q: summary[name].get(q) for q in ("p50", "p99")} for name in TIMES}
    good = sum(entry["good"] for entry in summary["classes"].values())
    kept = {name: summary[name] for name in KEPT}
    return {"seed": seed, **kept, "missed": summary["ok"] - good, **quantiles}


def run_policy(
    args: argparse.Namespace, policy: str, folder: Path, points: list[dict[str, Any]], speculation: str = "off"
) -> None:
    """Run all rates, then all of them again for each repetition, on one server."""
    load = LOADS[args.load]
    context = str(load.max_model_len)
    options = ["--served-model-name", args.model, "--load-format", "dummy", "--max-model-len", context]
    options += ["--gpu-memory-utilization", MEMORY_SHARE]
    options += [*shlex.split(MODELS[args.model].options), *shlex.split(POLICIES[policy])]
    options += ["--speculation", speculation]
    name = policy if speculation == "off" else f"{policy}, {speculation.partition(':')[0]}"
    log = args.out / f"slo-{args.load}-{name.replace(', ', '-')}.log"
    server = Server([str(folder), *options, *shlex.split(args.server_args)], log)
    try:
        args.start_s[name] = round(server.await_health(180.0), 2)
        for flags in load.warm_ups:
            run_client(args, server, shlex.split(flags), objectives=False)
        for repetition in range(args.repeat):
            for rate in args.rates:
                run = measure(args, server, rate, args.seed + 1000 * repetition)
                points.append({"policy": name, "rate": rate, **run})
                write(args, points)
                print(f"  {name:14} {rate:4g} req/s: adherence {run['adherence']:.3f}", flush=True)
    finally:
        server.stop()


def write(args: argparse.Namespace, points: list[dict[str, Any]]) -> None:
    load = LOADS[args.load]
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", "-m", "benchmarks.slo_gpu", *map(without_folders, sys.argv[1:])]),
        "commit": args.commit or git_commit(),
        "hardware": {**gpu(), **host()},
        "versions": {**versions(), **torch_versions()},
        "client": ["python", args.client.name] if args.client else ["roseinfer", "bench", "serve"],
        "model": args.model,
        "start_s": args.start_s,
        "load_name": args.load,
        "load": f"{load.flags}, {load.seconds} s of arrivals, context {load.max_model_len}",
        "classes": load.class_list(),
        "peer": {"name": "vLLM 0.24.0, another machine of the kind", "adherence and goodput": load.peer},
        "points": points,
    }
    name = "slo-gpu.json" if args.load == "six" else f"slo-gpu-{args.load}.json"
    (args.out / name).write_text(json.dumps(facts, indent=1) + "\n")


def show(found: Mapping[str, Any], picture: str | None) -> None:
    """Print the table of results and draw the plot: goodput over the arrivals, which is adherence times the rate."""
    load = LOADS[found.get("load_name", "six")]
    model = found.get("model", load.model)
    print(table(rows(found["points"], load, model)))
    if picture is None:
        return
    peers = [{"policy": "vLLM 0.24.0", "rate": rate, "adherence": kept} for rate, (kept, _) in load.peer.items()]
    drawn = [*found["points"], *peers]
    plot_sweep(
        picture,
        [{**point, "goodput_window_req_s": point["rate"] * point["adherence"]} for point in drawn],
        f"measured: {model} on one H200",
    )


def rows(points: Iterable[Mapping[str, Any]], load: Load, model: str = MODEL) -> list[dict[str, Any]]:
    """Return one line per policy and rate, medians over repetitions."""
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
    for point in points:
        groups.setdefault((point["policy"], point["rate"]), []).append(point)
    found = []
    for (policy, rate), runs in groups.items():
        line: dict[str, Any] = {"policy": policy, "req/s": rate}
        line["adherence"] = f"{median(run['adherence'] for run in runs):.3f}"
        line["goodput"] = f"{median(run['goodput_req_s'] for run in runs):.1f}"
        line["refused"] = sum(run["rejected"] for run in runs)
        line["missed"] = sum(run["missed"] for run in runs)
        line["failed"] = sum(run["failed"] for run in runs)
        for name in TIMES:
            line[f"{name[:-3].upper()} p50/p99 ms"] = "/".join(
                f"{median(run[name][q] for run in runs):.3g}" for q in ("p50", "p99")
            )
        if rate in load.peer:
            line["peer"] = "{:.3f} {:.1f}".format(*load.peer[rate])
        if policy == "slack" and rate in (targets := load.targets.get(model, {})):
            name, least = targets[rate]
            value = median(run[name] for run in runs)
            line["target"] = f"{name.split('_')[0]} {least}: {'yes' if value >= least else 'NO'}"
        found.append(line)
    return found


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", default="six", choices=LOADS, help="which classes, lengths and rates")
    parser.add_argument("--model", help="of the load's shape; default: the load's own")
    parser.add_argument("--out", type=Path, help="folder for the result and the logs")
    parser.add_argument("--show", type=Path, help="print the table of an earlier run's JSON, and measure nothing")
    parser.add_argument("--plot", help="with --show: a picture of it")
    parser.add_argument("--policies", default="slack", help=f"of {', '.join(POLICIES)}, with commas")
    parser.add_argument("--rates", help="requests a second, with commas; default: the load's")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--client", type=Path, help="another client's script")
    parser.add_argument("--models-dir", type=Path, help="where the model folder is, instead of making one")
    parser.add_argument("--server-args", default="", help="more arguments of `roseinfer serve`, in one word")
    parser.add_argument("--drafts-wrong", type=float, help="run each policy with drafts, too: the share of wrong ones")
    parser.add_argument("--commit", help="of roseinfer, where there is no git repository to ask")
    args = parser.parse_args(argv)
    args.policies = args.policies.split(",")
    args.rates = [float(rate) for rate in args.rates.split(",")] if args.rates else list(LOADS[args.load].rates)
    args.model = args.model or LOADS[args.load].model
    if args.model not in LOADS[args.load].models:
        parser.error(f"--load {args.load} is for {', '.join(LOADS[args.load].models)}")
    if (args.out is None) == (args.show is None):
        parser.error("give --out to measure, or --show")
    if unknown := set(args.policies) - set(POLICIES):
        parser.error(f"unknown policies: {', '.join(sorted(unknown))}")
    if args.client and LOADS[args.load].lengths_by_class:
        parser.error(f"--load {args.load} has lengths by class, which only `roseinfer bench serve` draws: no --client")
    return args


def main() -> int:
    args = parse_args()
    if args.show is not None:
        show(json.loads(args.show.read_text()), args.plot)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    args.start_s = {}
    points: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = (
            args.models_dir / MODELS[args.model].folder if args.models_dir else write_folder(args.model, Path(made))
        )
        if args.drafts_wrong is not None:
            run_policy(args, "fifo", folder, points, f"record:{made}/outputs.jsonl")
        for policy in args.policies:
            run_policy(args, policy, folder, points)
            if args.drafts_wrong is not None:
                drafts = f"recorded:{made}/outputs.jsonl,wrong={args.drafts_wrong:g},seed=0"
                run_policy(args, policy, folder, points, drafts)
    print(table(rows(points, LOADS[args.load], args.model)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
