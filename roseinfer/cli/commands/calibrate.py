"""roseinfer calibrate: what steps cost on this machine, for the simulator and for a scheduler's first guess."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from roseinfer.calibration.config import CalibrateConfig
from roseinfer.cli.commands.groups import CACHE, MODEL, NESTED, PRICED, PROFILE, engine_config
from roseinfer.config.options import Group, OptionParser, OptionSet
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.sched.prefill import PrefillOptions

NAME = "calibrate"
HELP = "measure what steps cost, and fit the cost model that schedulers and the simulator use"
# Here the sweep chooses the steps, no policy.
CHOSEN = frozenset({"scheduling_policy", "prefill_admission_policy", "max_inflight_requests", "max_active_requests"})
OPTIONS = OptionSet(
    Group(CalibrateConfig, "sweep"),
    MODEL,
    CACHE,
    Group(SchedulerConfig, "scheduler", skip=NESTED | CHOSEN),
    Group(PrefillOptions, "prompts", skip=frozenset({"max_batch_size"})),
    PROFILE,
    PRICED,
)


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    config, engine = OPTIONS.build(CalibrateConfig, given), engine_config(OPTIONS, given)

    from roseinfer.bench.report import header, write_json
    from roseinfer.calibration.run import calibrate

    print(header("roseinfer calibrate", given), flush=True)
    found = calibrate(config, engine)
    print(found.as_text())
    if config.json:
        write_json(config.json, found.as_json(), given)
        print(f"roseinfer simulate --cost {config.json}{_simulate_flags(found.machine)}")
    return 0


def _simulate_flags(machine: Mapping[str, Any]) -> str:
    """A cost model says nothing of the context and the cache."""
    flags = {"max_model_len": "--max-model-len", "num_blocks": "--num-kv-blocks", "block_size": "--block-size"}
    return "".join(f" {flag} {machine[name]}" for name, flag in flags.items() if name in machine)
