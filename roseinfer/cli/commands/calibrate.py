"""roseinfer calibrate: measure step costs on this machine for the simulator and schedulers."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from roseinfer.calibration.config import CalibrateConfig
from roseinfer.cli.commands.groups import CACHE, MODEL, NESTED_OPTIONS, PRICED, PROFILE, engine_config
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.sched.prefill import PrefillOptions

NAME = "calibrate"
HELP = "measure step costs and fit the cost model of schedulers and the simulator"
# The sweep chooses the steps; no policy runs.
CHOSEN = frozenset({"scheduling_policy", "prefill_admission_policy", "max_inflight_requests", "max_active_requests"})
OPTIONS = OptionSet(
    Group(CalibrateConfig, "sweep"),
    MODEL,
    CACHE,
    Group(SchedulerConfig, "scheduler", skip=NESTED_OPTIONS | CHOSEN),
    Group(PrefillOptions, "prompts", skip=frozenset({"max_batch_size"})),
    PROFILE,
    PRICED,
)


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
    """Return options of `simulate` that the cost model does not contain: context and cache."""
    flags = {"max_model_len": "--max-model-len", "num_blocks": "--num-kv-blocks", "block_size": "--block-size"}
    return "".join(f" {flag} {machine[name]}" for name, flag in flags.items() if name in machine)
