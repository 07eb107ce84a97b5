"""The four experiments of docs/research/experiments, with the tables and plots of their pages.

    python -m benchmarks.experiments --out DIR [--only packing ...] [--repeat-runs 3] -- MODEL [engine options]

Arguments after `--` are passed to every `roseinfer bench streaming`. Writes DIR/experiments.json and a plot for each
experiment, and prints the commands and Markdown tables.
"""

import argparse
import asyncio
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from roseinfer.attention.kv_store import KVStore
from roseinfer.bench.plot import check_plot, plot_latencies
from roseinfer.bench.report import hardware, versions
from roseinfer.bench.streaming_compare import Setting, SettingRuns, measure
from roseinfer.bench.streaming_report import samples, summarise
from roseinfer.cli.commands.bench_streaming import OPTIONS, make_setting
from roseinfer.config.parser import OptionParser
from roseinfer.core.plan import StepPlan
from roseinfer.models.base import CausalLM
from roseinfer.runner.forward import ForwardPass

Around = Callable[[], AbstractContextManager[object]]
# Name in a table -> keys in a report.
COLUMNS = {
    "add_request p50": ("add_request_ms", "p50"),
    "p99": ("add_request_ms", "p99"),
    "submit wall s": ("submit_wall_s",),
    "TTFT p50": ("ttft_ms", "p50"),
    "TTFT p99": ("ttft_ms", "p99"),
    "TPOT p99": ("tpot_ms", "p99"),
    "ITL p99": ("itl_ms", "p99"),
    "latency p99": ("latency_ms", "p99"),
    "tok/s": ("throughput_tok_s",),
}


@dataclass(frozen=True)
class Experiment:
    """One experiment. `settings`: name -> additional flags; the first setting is the baseline."""

    name: str
    flags: str
    settings: Mapping[str, str]
    context: Mapping[str, Around]


@contextmanager
def copies_one_by_one() -> Iterator[None]:
    """Make engines built in this context copy blocks one request, layer, and K or V at a time."""
    from roseinfer.runner import assembly

    copied: list[int] = []

    class OneByOneRunner(assembly.ModelRunner):
        def __init__(self, model: CausalLM, forward: ForwardPass, store: KVStore, *rest: Any) -> None:
            super().__init__(model, forward, store, *rest)
            self._planes = store.data.flatten(1, 2).unbind(1)

        @torch.inference_mode()
        def submit(self, plan: StepPlan) -> Any:
            for src, dst, tokens in plan.copies:
                for plane in self._planes:
                    plane[dst, :tokens].copy_(plane[src, :tokens])
            copied.append(len(plan.copies))
            return super().submit(replace(plan, copies=[]))

    with patch.object(assembly, "ModelRunner", OneByOneRunner):
        yield
    if not sum(copied):
        raise RuntimeError("no block was copied: the comparison would mean nothing")


EXPERIMENTS = (
    Experiment("admission", "--num-requests 32 --max-new-tokens 8 --no-stop-on-eos", {"burst": ""}, {}),
    Experiment(
        "budget",
        "--prompt 'Hello, my name is' --prompt-repeats 1,1,1,64 --submit-interval-ms 20 --num-requests 32 "
        "--max-new-tokens 32 --no-stop-on-eos --no-prefix-cache --max-num-batched-tokens 8192",
        {
            "unbounded": "--no-chunked-prefill",
            "budget": "--no-chunked-prefill --prefill-max-tokens 128",
            "chunks of 192": "--chunked-prefill --prefill-max-tokens 192",
            "chunks of 64": "--chunked-prefill --prefill-max-tokens 64",
        },
        {},
    ),
    Experiment(
        "packing",
        "--prompt-repeats 512,1,1,1 --num-requests 128 --max-new-tokens 32 --no-stop-on-eos --no-prefix-cache "
        "--prefill-max-tokens 256 --max-batch-size 8 --max-num-seqs 128",
        {
            "fifo": "--no-chunked-prefill",
            "pack": "--no-chunked-prefill --prefill-admission-policy pack --prefill-force-fifo-every 8",
            "fifo, chunked": "--chunked-prefill",
            "pack, chunked": "--chunked-prefill --prefill-admission-policy pack --prefill-force-fifo-every 8",
        },
        {},
    ),
    Experiment(
        "copy-on-write",
        "--prompt-repeats 64 --block-size 64 --num-requests 512 --max-new-tokens 2 --no-stop-on-eos --max-num-seqs 512",
        {"one by one": "", "batched": "", "no prefix cache": "--no-prefix-cache"},
        {"one by one": copies_one_by_one},
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[e.name for e in EXPERIMENTS])
    parser.add_argument("--warmup-runs", type=int, default=1)
    parser.add_argument("--repeat-runs", type=int, default=3)
    parser.add_argument("engine", nargs="*", help="MODEL and engine options, after --")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    check_plot("x.png")
    common = ["--warmup-runs", str(args.warmup_runs), "--repeat-runs", str(args.repeat_runs), *args.engine]
    done = {}
    for experiment in EXPERIMENTS:
        if args.only is None or experiment.name in args.only:
            done[experiment.name] = run(experiment, common, args.out)
            # Save after each experiment, so that a later failure loses nothing.
            result = {"versions": versions(), "hardware": hardware(), "experiments": done}
            (args.out / "experiments.json").write_text(json.dumps(result, indent=1) + "\n")


def run(experiment: Experiment, common: Sequence[str], out: Path) -> dict[str, Any]:
    print(f"\n## {experiment.name}\n", flush=True)
    commands = {name: [*shlex.split(f"{experiment.flags} {own}"), *common] for name, own in experiment.settings.items()}
    settings = [setting(name, flags, experiment.context) for name, flags in commands.items()]
    for name, flags in commands.items():
        print(f"{name}: roseinfer bench streaming {shlex.join(flags)}", flush=True)
    measured = asyncio.run(measure(settings))
    reports = {name: report(result) for name, result in measured.items()}
    print(f"\n{markdown(reports)}\n", flush=True)
    drawn = {name: samples(result.runs) for name, result in measured.items()}
    plot_latencies(str(out / f"{experiment.name}.png"), experiment.name, drawn)
    return {
        name: {
            "command": ["roseinfer", "bench", "streaming", *commands[name]],
            "copies": "one by one" if name in experiment.context else "batched",
            "report": reports[name],
            "samples": {key: [float(f"{value:.5g}") for value in values] for key, values in drawn[name].items()},
        }
        for name in reports
    }


def setting(name: str, flags: Sequence[str], context: Mapping[str, Around]) -> Setting:
    parser = OptionParser()
    OPTIONS.add_to(parser)
    given = OPTIONS.read(parser.parse_args(flags))
    return replace(make_setting(name, given), context=context.get(name, nullcontext))


def report(result: SettingRuns) -> dict[str, Any]:
    assert result.info is not None
    return summarise(result.info, result.runs)


def markdown(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table in milliseconds unless the column says otherwise; later rows also show the ratio to the first."""
    first = next(iter(reports.values()))
    lines = [f"| setting | {' | '.join(COLUMNS)} |", "| --- |" + " ---: |" * len(COLUMNS)]
    for name, values in reports.items():
        cells = []
        for keys in COLUMNS.values():
            value, base = look_up(values, keys), look_up(first, keys)
            cells.append(f"{value:.4g}" + (f" ({value / base:.2f})" if values is not first else ""))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def look_up(values: Mapping[str, Any], keys: Sequence[str]) -> float:
    found: Any = values
    for key in keys:
        found = found[key]
    return float(found)


if __name__ == "__main__":
    main()
