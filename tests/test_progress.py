"""How far something is, said where it takes long."""

import io

import pytest

from roseinfer.commands import progress
from roseinfer.commands.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, moments: list[float], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is written if things are done at these moments."""
    clock = iter([0.0, *moments])
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with Progress("loads", out) as line:
        for number in range(1, len(moments) + 1):
            line.show(number, 10)
    return out.getvalue()


def test_nothing_is_said_of_what_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), [0.5, 1.0, 1.9], monkeypatch) == ""


def test_lines_now_and_then_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(io.StringIO(), [3.0, 4.0, 5.0, 40.0], monkeypatch)
    assert said == "1 of 10 loads, some 27 s left\n4 of 10 loads, some 60 s left\n"


def test_one_line_on_a_terminal_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(Terminal(), [3.0, 4.0], monkeypatch)
    assert "\n" not in said and said.endswith("\r\x1b[K")
    assert "2 of 10 loads, some 16 s left" in said
