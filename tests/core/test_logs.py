"""Log lines as JSON: one object each, whatever is in them."""

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
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
