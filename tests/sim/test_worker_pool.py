"""Simulations in several processes, and Ctrl+C at a terminal."""

import time
from pathlib import Path

from tests.cli.terminal.pseudo_terminal import PseudoTerminal

SWEEP = ("simulate", "--setup", "scorpio-8b", "--rates", "7", "--requests", "20000", "--seeds", "4", "--jobs", "2")
PATIENCE_S = 60


def children(pid: int) -> int:
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def test_an_interrupt_ends_all_processes_and_says_nothing() -> None:
    with PseudoTerminal(*SWEEP) as terminal:
        deadline = time.monotonic() + PATIENCE_S
        while children(terminal.pid) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        terminal.type("\x03")
        assert terminal.exit_code() == 130
    assert "Traceback" not in terminal.shown
