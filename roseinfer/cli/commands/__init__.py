"""The sub-commands of `roseinfer`: one module each, listed here. Imports nothing heavy, so that `--help` is quick."""

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
    chat,
    complete,
    deploy,
    doctor,
    engine,
    generate,
    serve,
    simulate,
    top,
    train_predictor,
)
from roseinfer.config.options import OptionParser, OptionSet


class Command(Protocol):
    """What a module of this package offers. A NAME of two words is a command of a group, as in `bench latency`."""

    NAME: str
    HELP: str
    OPTIONS: OptionSet

    @property
    def configure(self) -> Callable[[OptionParser], None]:
        """Add what OPTIONS does not cover."""
        ...

    @property
    def run(self) -> Callable[[Namespace], int]:
        """Do it; returns the exit status. May raise any `RoseinferError`."""
        ...


COMMANDS: tuple[Command, ...] = (
    serve,
    engine,
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
