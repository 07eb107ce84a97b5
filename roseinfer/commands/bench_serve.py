"""roseinfer bench serve: load on a server that is up, from arrivals that do not wait for it."""

from argparse import Namespace

from roseinfer.bench.config import OpenLoopConfig
from roseinfer.options import Group, OptionParser, OptionSet

NAME = "bench serve"
HELP = "time requests that arrive at a running OpenAI-compatible server, ours or another"
OPTIONS = OptionSet(Group(OpenLoopConfig, "load"))


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    config = OPTIONS.build(OpenLoopConfig, given)

    from roseinfer.bench.arrivals import classes_of
    from roseinfer.bench.open_loop import run as run_load
    from roseinfer.bench.open_loop_report import as_text, summarise
    from roseinfer.bench.report import header, host, write_json

    shown = {name: value for name, value in given.items() if name != "api_key"}
    classes = classes_of(config)
    machine = host()  # of the client: what the server runs on is not known here
    print(header("roseinfer bench serve", shown, machine), flush=True)
    summary = summarise(run_load(config), classes)
    print(as_text(summary))
    if config.json:
        write_json(config.json, {"label": config.label, "summary": summary}, shown, machine)
    # With objectives, turning requests away is an answer.
    answered = summary["ok"] + (summary["rejected"] if classes else 0)
    return 0 if answered == summary["requests"] else 1
