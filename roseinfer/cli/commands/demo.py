"""roseinfer demo: a server, a load and the console, with promises that are kept, late and rejected."""

import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

from roseinfer.cli.commands.asking import download, engine_flags
from roseinfer.cli.commands.groups import ENGINE
from roseinfer.cli.terminal.config import DemoConfig
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.progress import report, stage

if TYPE_CHECKING:
    from roseinfer.cli.terminal.demo_load import Tally
    from roseinfer.cli.terminal.demo_plan import DemoKind
    from roseinfer.cli.terminal.own_server import OwnServer

NAME = "demo"
HELP = "serve a model under a small load, and watch promises being kept, late and rejected"
COMMON = ("duration", "port", "dtype", "max_model_len")
EXAMPLES = (
    "roseinfer demo                                 a minute with the embedded model",
    "roseinfer demo Qwen/Qwen3-0.6B --duration 120  another model, two minutes",
)
OPTIONS = OptionSet(Group(DemoConfig, "demo"), *ENGINE)
DEFAULT_PORT = 8000
LINE_INTERVAL_S = 5.0  # where lines stay
NEXT = """what to try next:
  roseinfer serve                   a server of your own; its console is the same page
  roseinfer chat                    a conversation in the terminal; /slo ttft=200ms sets a promise
  roseinfer top                     promises, engines and slow requests of a running server
  docs/how-to/objectives.md         what to promise, and what happens when it cannot be kept"""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    config = OPTIONS.build(DemoConfig, given)

    from roseinfer.cli.terminal.demo_load import Tally
    from roseinfer.cli.terminal.own_server import OwnServer

    download(OPTIONS, given)
    port = config.port if config.port is not None else DEFAULT_PORT if _is_free(DEFAULT_PORT) else 0
    tally = Tally()
    with stage("starting the engine"):
        server = OwnServer([f"--port={port}", *engine_flags(given)], report, keyed=False).__enter__()
    try:
        _load(server, config, tally)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.close()
    _show_end(tally)
    return 0


def _load(server: "OwnServer", config: DemoConfig, tally: "Tally") -> None:
    from roseinfer.cli.terminal.demo_load import measure, run
    from roseinfer.cli.terminal.demo_plan import plan

    remote, duration_s = server.remote, config.duration or inf
    print(f"console: {remote.url}/ - open it in a browser and watch; Ctrl+C ends the demo", flush=True)
    model = next(iter(remote.models()))
    with stage("measuring the idle machine"):
        speed = measure(remote, model)
    idle = f"first token {1000 * speed.ttft_s:.0f} ms, each further one {1000 * speed.tpot_s:.1f} ms"
    print(f"one request on the idle machine: {idle}; promises are multiples of these", flush=True)
    live = _Live(server, tally)
    try:
        run(remote, model, plan(speed, duration_s, config.load_seed), duration_s, tally, live.show)
    finally:
        live.close()


class _Live:
    """Newest counts: one line that is overwritten on a terminal, elsewhere a line now and then."""

    def __init__(self, server: "OwnServer", tally: "Tally") -> None:
        self._server = server
        self._tally = tally
        self._terminal = sys.stdout.isatty()
        self._next_s = 0.0
        self._announced_s: dict[DemoKind, float] = {}

    def show(self, now_s: float, started: "Sequence[DemoKind]") -> None:
        """Print the counts, and what begins. Raise `OwnServerError` if the server has exited."""
        from roseinfer.cli.terminal.demo_plan import ANNOUNCEMENTS, CYCLE_S

        self._server.check(lost=False)
        for kind in dict.fromkeys(started):
            if kind in ANNOUNCEMENTS and now_s - self._announced_s.get(kind, -inf) > CYCLE_S / 2:
                self._announced_s[kind] = now_s
                self._print(f"{now_s:4.0f} s: {ANNOUNCEMENTS[kind]}\n")
        if self._terminal:
            self._print(f"{now_s:4.0f} s: {self._tally.line()}")
        elif now_s >= self._next_s:
            self._next_s = now_s + LINE_INTERVAL_S
            self._print(f"{now_s:4.0f} s: {self._tally.line()}\n")

    def close(self) -> None:
        if self._terminal:
            self._print("")

    def _print(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._terminal else text, end="", flush=True)


def _show_end(tally: "Tally") -> None:
    from roseinfer.cli.terminal.demo_load import PromiseEnd
    from roseinfer.cli.terminal.demo_plan import DemoKind

    for kind in DemoKind:
        ends = ", ".join(f"{ending} {tally.count(ending, kind)}" for ending in PromiseEnd if tally.count(ending, kind))
        if tally.sent[kind]:
            print(f"{kind:>10}: sent {tally.sent[kind]}" + (f", {ends}" if ends else ""))
    print(f"     total: {tally.line()}")
    print(NEXT)


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
