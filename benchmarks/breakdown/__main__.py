"""Print the breakdown of the time of a step.

python -m benchmarks.breakdown [MODEL] [--batch-size N ...] [--prompt-tokens N ...] [--input-len N] [--steps N]
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from roseinfer.cli.commands import Command
from roseinfer.cli.commands.groups import ENGINE, engine_config
from roseinfer.cli.main import run_alone
from roseinfer.config.options import Group, OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.breakdown.loads import Load
    from benchmarks.breakdown.measure import Breakdown

NAME = "breakdown"
HELP = "show where the time of a step goes"
# Steps with prompts take long and hardly vary.
PROMPT_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownConfig:
    """Loads to measure, and limits to compare with."""

    input_len: int = option(32, "prompt tokens of each request")
    batch_size: tuple[int, ...] = option((8,), "requests at once; may be given several times (default: 8)")
    prompt_tokens: tuple[int, ...] = option(
        (),
        "also measure steps that compute so many tokens of new prompts, alone and beside each batch; may be given "
        "several times (needs max_num_batched_tokens for all of a step)",
    )
    steps: int = option(32, "steps that the breakdown is measured over")
    adapted_rows: int | None = option(
        None, "requests of each batch that use the adapters of --lora, in turn (default: all)"
    )
    peak_bandwidth: float | None = option(None, "of the device in GB/s; default: measured, a copy")
    peak_tflops: float | None = option(None, "of the device; default: measured, a product of matrices")
    json: str | None = option(None, "write the result to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_positive(self, "input_len", "steps", "peak_bandwidth", "peak_tflops")
        if any(size < 1 for size in self.batch_size):
            raise ConfigError("batch_size must be positive")
        if self.adapted_rows is not None and self.adapted_rows < 0:
            raise ConfigError("adapted_rows must not be negative")
        if any(tokens < 1 for tokens in self.prompt_tokens):
            raise ConfigError("prompt_tokens must be positive")

    def loads(self, seed: int) -> list["Load"]:
        """Return each batch alone; then the prompts, alone and with each batch."""
        from benchmarks.breakdown.loads import Load

        pairs = [(size, 0) for size in self.batch_size]
        pairs += [(size, tokens) for size in (0, *self.batch_size) for tokens in self.prompt_tokens]
        return [
            Load(
                size,
                self.input_len,
                min(PROMPT_STEPS, self.steps) if tokens else self.steps,
                seed + size,
                tokens,
                self.adapted_rows,
            )
            for size, tokens in pairs
        ]


OPTIONS = OptionSet(Group(BreakdownConfig, "benchmark"), *ENGINE)


def configure(parser: OptionParser) -> None:
    """Do nothing: all options are in OPTIONS."""


def run(args: Namespace) -> int:
    """Print the breakdown of each load, measured on one engine."""
    given = OPTIONS.read(args)
    config, engine = OPTIONS.build(BreakdownConfig, given), engine_config(OPTIONS, given)
    if engine.profile.profile is not None:
        raise ConfigError("profile: cannot be combined with a breakdown, which observes the engine as well")

    from benchmarks.breakdown.report import as_json, as_text
    from roseinfer.bench.report import header, write_json

    print(header("breakdown", given), flush=True)
    engine_options = {option.name for group in ENGINE for option in group.options()}
    options = {name: value for name, value in given.items() if name in engine_options}
    results = []
    for found in break_down(config, engine.model, options):
        print(f"\n{as_text(found)}", flush=True)
        results.append(as_json(found))
        if config.json:  # also after an interrupted run
            write_json(config.json, {"breakdown": results}, given)
    return 0


def break_down(config: BreakdownConfig, model: ModelConfig, options: dict[str, Any]) -> Iterator["Breakdown"]:
    """Measure each load. `options`: the engine's.

    Raise what `LocalEngine` raises, `UnsteadyError`, and `ConfigError` for options that a breakdown does not support.
    """
    import torch

    from benchmarks.breakdown.engine_cost import engine_cost
    from benchmarks.breakdown.limits import measure_limits
    from benchmarks.breakdown.measure import HostClock, measure
    from benchmarks.breakdown.report import start_as_text
    from roseinfer.config.hub import model_folder
    from roseinfer.engine.local import LocalEngine
    from roseinfer.engine.options import make_engine_config
    from roseinfer.models.config import read_model_spec

    if model.threads is not None:
        torch.set_num_threads(model.threads)
    device = torch.device("cuda" if torch.cuda.is_available() and model.device != "cpu" else "cpu")
    if device.type == "cpu" and options.get("overlap"):
        raise ConfigError("overlap: not supported on a CPU, where steps then run on a separate thread")
    bytes_s = config.peak_bandwidth and 1e9 * config.peak_bandwidth
    flops_s = config.peak_tflops and 1e12 * config.peak_tflops
    limits = measure_limits(device, bytes_s, flops_s)  # before the engine takes the memory
    clock = HostClock()
    with LocalEngine(make_engine_config(**options), clock) as engine:
        print(start_as_text(engine.info), flush=True)
        cost = engine_cost(read_model_spec(model_folder(model), model.max_model_len), engine.info)
        for load in config.loads(model.seed):
            yield measure(engine, clock, load, cost, limits)


def main(argv: Sequence[str] | None = None) -> int:
    return run_alone(cast(Command, sys.modules[__name__]), "python -m benchmarks.breakdown", argv)


if __name__ == "__main__":
    sys.exit(main())
