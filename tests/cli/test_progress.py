"""Progress lines of long operations."""

import errno
import io
import threading

import pytest

from roseinfer.cli.commands import progress
from roseinfer.cli.commands.progress import Progress
from roseinfer.core import progress as core


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Full(io.StringIO):
    """File on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Set the current time."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "REDRAW_INTERVAL_S", 0.2)
    monkeypatch.setattr(progress.threading.Thread, "start", lambda thread: None)  # the background thread must not write
    return now


def shown(out: io.StringIO, moments: list[float], clock: list[float]) -> str:
    """Return what is written when operations report at these times."""
    with Progress("loads", out) as line:
        for number, moment in enumerate(moments, 1):
            clock[0] = moment
            line.report("loads", number, 10)
    return out.getvalue()


def test_nothing_is_said_of_what_is_done_at_once(clock: list[float]) -> None:
    assert shown(io.StringIO(), [0.5, 1.0, 1.9], clock) == ""
    assert shown(Terminal(), [0.5, 1.0, 1.9], clock) == ""


def test_lines_now_and_then_in_a_file(clock: list[float]) -> None:
    said = shown(io.StringIO(), [3.0, 4.0, 5.0, 40.0], clock)
    assert said == "loads: 1 of 10, some 27 s left\nloads: 4 of 10, some 60 s left\n"


def test_one_line_on_a_terminal_that_goes_away(clock: list[float]) -> None:
    said = shown(Terminal(), [3.0, 4.0], clock)
    assert "\n" not in said and said.endswith("\r\x1b[K")
    assert "loads: 2 of 10, some 16 s left" in said


def test_a_full_disk_does_not_end_the_work(clock: list[float]) -> None:
    assert shown(Full(), [3.0, 40.0], clock) == ""


def test_stages(clock: list[float]) -> None:
    out = io.StringIO()
    line = Progress("", out)
    line.report("loading")
    clock[0] = 1.5
    line.report("")
    line.report("sizing")  # no gap: still the same wait
    clock[0] = 2.5
    line.tick()
    assert out.getvalue() == "sizing: 1 s\n"
    clock[0] = 40.0
    line.report("")
    line.tick()
    clock[0] = 50.0
    line.report("another")
    clock[0] = 51.0
    line.tick()
    assert out.getvalue() == "sizing: 1 s\n", "what begins later is another wait, and nothing is said between them"
    line.close()
    clock[0] = 99.0
    line.report("late", 1, 2)
    assert out.getvalue() == "sizing: 1 s\n", "nothing comes behind its end"


def test_a_thread_writes_while_nobody_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "REDRAW_INTERVAL_S", 0.001)
    written = threading.Event()

    class Out(Terminal):
        def write(self, text: str) -> int:
            if "1 of 3" not in text:
                written.set()
            return super().write(text)

    with Progress("waiting", Out()):
        assert written.wait(10.0)


def test_what_others_report_is_shown_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    core.report("before", 1, 2)
    with progress.shown():
        with core.stage("weights") as step:
            step(1, 2)
        assert out.getvalue().endswith("\r\x1b[K")
        with pytest.raises(ValueError), core.stage("broken"):
            raise ValueError
    core.report("after", 1, 2)
    assert "weights" in out.getvalue() and out.getvalue().endswith("\r\x1b[K")
    assert "before" not in out.getvalue() and "after" not in out.getvalue()
