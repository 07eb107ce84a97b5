"""roseinfer doctor: check whether serving works on this machine, and explain failures."""

import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from roseinfer.cli.commands.groups import REMOVED_SECRET
from roseinfer.cli.doctor.config import DoctorConfig
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.progress import stage

if TYPE_CHECKING:
    from roseinfer.cli.doctor.checks import Check

NAME = "doctor"
HELP = "check what works on this machine, what does not, and why"
OPTIONS = OptionSet(Group(DoctorConfig, "what to look at", positional="model"), removed=REMOVED_SECRET)
COLOURS = {"ok": "\x1b[32m", "warning": "\x1b[33m", "problem": "\x1b[31m"}


def run(args: Namespace) -> int:
    config = OPTIONS.build(DoctorConfig, OPTIONS.read(args))

    from roseinfer.cli.doctor.checks import CheckState, judge
    from roseinfer.cli.doctor.probes import collect_facts

    with stage("looking at PyTorch and the devices"):
        facts = collect_facts(config)
    checks = judge(facts)
    works = all(check.state is not CheckState.PROBLEM for check in checks)
    if config.json:
        print(json.dumps({"works": works, "checks": [check.as_json() for check in checks]}, indent=2))
    else:
        print(as_text(checks, colours=sys.stdout.isatty()))
        print("serving will work" if works else "serving will not work: see the problems above")
    return 0 if works else 1


def as_text(checks: "list[Check]", *, colours: bool) -> str:
    """Format one line per check, with its remedy below."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        state = check.state.ljust(len("problem"))
        if colours:
            state = f"{COLOURS[check.state]}{state}\x1b[0m"
        lines.append(f"{state}  {check.name.ljust(width)}  {check.found}")
        if check.advice is not None:
            lines.append(f"{' ' * (len('problem') + width + 4)}-> {check.advice}")
    return "\n".join(lines)
