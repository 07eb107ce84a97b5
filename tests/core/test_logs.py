"""Log lines as JSON: one object each, whatever is in them."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core import logs


class Line:
    """A message with members of its own."""

    def json_members(self) -> str:
        return '"message": "request ended", "e2e_ms": 1.5'

    def __str__(self) -> str:
        return "request=..."


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    yield
    root.setLevel(before)


def said(monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a process that has not configured anything
    logs.configure(level="INFO", **how)
    log = logging.getLogger("roseinfer.x")
    log.info("two\nlines of %s", "text")
    log.info(Line())
    try:
        raise ValueError("bug")
    except ValueError:
        log.exception("it failed")
    return out.getvalue().splitlines()


def test_each_line_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in said(monkeypatch, as_json=True, engine=1)]
    assert logs.logs_json()
    assert [line["message"] for line in lines] == ["two\nlines of text", "request ended", "it failed"]
    assert all(line["logger"] == "roseinfer.x" and line["engine"] == 1 for line in lines)
    assert lines[1]["e2e_ms"] == 1.5
    assert lines[0]["time"].endswith("Z") and lines[2]["level"] == "ERROR"
    assert "ValueError: bug" in lines[2]["exception"]


def test_text_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = said(monkeypatch, as_json=False)
    assert lines[0].endswith("INFO roseinfer.x: two") and lines[2].endswith("INFO roseinfer.x: request=...")
    assert not logs.logs_json()


def test_an_engine_of_several_says_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert " engine 2 INFO " in said(monkeypatch, as_json=False, engine=2)[0]


@pytest.mark.parametrize(("as_json", "times"), [
    (True, ["1970-01-01T00:00:01.250Z", "1970-01-01T00:00:02.000Z", "1970-01-01T00:00:01.999Z"]),
    (False, ["01,250", "02,000", "01,999"]),
])  # fmt: skip
def test_each_line_has_its_own_time(monkeypatch: pytest.MonkeyPatch, as_json: bool, times: list[str]) -> None:
    said(monkeypatch, as_json=as_json)
    [handler] = logging.getLogger().handlers
    for created, time in zip((1.25, 2.0, 1.999), times, strict=True):
        record = logging.makeLogRecord({"msg": "x", "created": created, "msecs": created % 1 * 1000})
        line = handler.format(record)
        assert json.loads(line)["time"] == time if as_json else re.match(rf"[\d-]{{10}} \d\d:\d\d:{time} ", line)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Standard error in a buffered file, and a logging configuration of its own."""
    path = tmp_path / "log"
    with path.open("w") as out:
        monkeypatch.setattr(sys, "stderr", out)
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        logs.configure(as_json=False, level="INFO")
        yield path


def test_a_line_is_written_at_once(file: Path) -> None:
    logging.getLogger("roseinfer.x").info("first")
    assert file.read_text().endswith("INFO roseinfer.x: first\n")


def test_lines_of_threads_stay_whole_and_in_order(file: Path) -> None:
    def talk(name: str) -> None:
        for number in range(100):
            logging.getLogger(name).info("%d", number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, "abcd"))
    messages = [line.split(" INFO ")[1] for line in file.read_text().splitlines()]
    for name in "abcd":
        assert [each for each in messages if each.startswith(name)] == [f"{name}: {n}" for n in range(100)]
    assert len(messages) == 400


def test_text_has_the_traceback_and_the_stack(file: Path) -> None:
    log = logging.getLogger("roseinfer.x")
    try:
        raise ValueError("bug")
    except ValueError:
        log.exception("it failed")
    log.info("here", stack_info=True)
    text = file.read_text()
    assert re.search(r"it failed\nTraceback .*ValueError: bug\n", text, re.DOTALL)
    assert re.search(r"here\nStack .*test_text_has_the_traceback", text, re.DOTALL)


def test_filters_of_the_handler_apply(file: Path) -> None:
    handler, *_ = logging.getLogger().handlers  # pytest adds its own
    handler.addFilter(lambda record: record.msg != "secret")
    log = logging.getLogger("roseinfer.x")
    log.info("secret")
    log.info("public")
    assert file.read_text().count("\n") == 1 and "public" in file.read_text()


def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, as_json=False)
    sys.stderr.close()
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logging.getLogger("roseinfer.x").info("closed")
    assert "Logging error" in out.getvalue()
