"""Subcommands of `roseinfer`, one module each. Importing this package loads nothing heavy, so that `--help` is fast."""

from argparse import Namespace
from collections.abc import Callable
from typing import Protocol

from roseinfer.cli.commands import (
    bench_compare,
    bench_latency,
    bench_serve,
    bench_streaming,
    bench_throughput,
    calibrate,
    certificates,
    chat,
    complete,
    demo,
    deploy,
    doctor,
    engine,
    generate,
    serve,
    simulate,
    top,
    train_predictor,
)
from roseinfer.config.options import OptionSet
from roseinfer.config.parser import OptionParser


class Command(Protocol):
    """Interface of the modules of this package. A NAME of two words is a command of a group, such as `bench latency`.

    A module may also define `configure(parser)` to add arguments that OPTIONS does not cover, COMMON, the names of the
    options that `--help` shows without `=all`, and EXAMPLES, command lines with a meaning.
    """

    NAME: str
    HELP: str
    OPTIONS: OptionSet

    @property
    def run(self) -> Callable[[Namespace], int]:
        """Run the command and return its exit status. May raise any `RoseinferError`."""
        ...


COMMANDS: tuple[Command, ...] = (
    serve,
    demo,
    engine,
    certificates,
    deploy,
    chat,
    complete,
    top,
    doctor,
    generate,
    bench_latency,
    bench_throughput,
    bench_streaming,
    bench_serve,
    bench_compare,
    simulate,
    calibrate,
    train_predictor,
)


def add_arguments(command: Command, parser: OptionParser) -> None:
    """Add all arguments of a command to its parser."""
    configure = getattr(command, "configure", None)
    if configure is not None:
        configure(parser)
    command.OPTIONS.add_to(parser)
