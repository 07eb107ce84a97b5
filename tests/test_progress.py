"""How far something is, said where it takes long."""

import io
import threading

import pytest

from roseinfer.commands import progress
from roseinfer.commands.progress import Progress
from roseinfer.core import progress as core


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, moments: list[float], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is written if things are done at these moments."""
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    with Progress("loads", out) as line:
        for number, moment in enumerate(moments, 1):
            now[0] = moment
            line.show(number, 10)
    return out.getvalue()


def test_nothing_is_said_of_what_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), [0.5, 1.0, 1.9], monkeypatch) == ""


def test_lines_now_and_then_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(io.StringIO(), [3.0, 4.0, 5.0, 40.0], monkeypatch)
    assert said == "loads: 1 of 10, some 27 s left\nloads: 4 of 10, some 60 s left\n"


def test_one_line_on_a_terminal_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(Terminal(), [3.0, 4.0], monkeypatch)
    assert "\n" not in said and said.endswith("\r\x1b[K")
    assert "loads: 2 of 10, some 16 s left" in said


def test_stages_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress("loading", out) as line:
        now[0] = 3.0
        line.report("loading", 1, 2)
        now[0] = 50.0
        line.report("sizing")
        now[0] = 90.0
        line.tick()
    assert out.getvalue() == "loading: 1 of 2, some 3 s left\nsizing: 0 s\nsizing: 40 s\n"
    line.report("late", 1, 2)
    assert out.getvalue().endswith("sizing: 40 s\n"), "nothing comes behind its end"


def test_a_thread_writes_while_nobody_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SOON_S", 0.0)
    monkeypatch.setattr(progress, "FRAME_S", 0.001)
    written = threading.Event()

    class Out(Terminal):
        def write(self, text: str) -> int:
            written.set()
            return super().write(text)

    with Progress("waiting", Out(), ticks=True):
        assert written.wait(10.0)


def test_what_others_report_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SOON_S", 0.0)
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    core.report("before", 1, 2)
    with progress.told("working"):
        core.report("weights", 1, 2)
    core.report("after", 1, 2)
    assert "weights: 1 of 2" in out.getvalue()
    assert "before" not in out.getvalue() and "after" not in out.getvalue()
