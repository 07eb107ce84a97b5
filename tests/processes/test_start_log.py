"""Long stages of a start are logged, short ones are not."""

import logging
import time

import pytest

from roseinfer.core.progress import listening, stage
from roseinfer.processes import start_log
from roseinfer.processes.start_log import LoggedStages


def test_long_stages_are_logged_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_log, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(start_log, "REPEAT_S", 0.01)
    with caplog.at_level(logging.INFO), listening(LoggedStages()):
        with stage("reading weights") as step:
            step(3, 7)
            deadline = time.monotonic() + 20
            while caplog.text.count("reading weights: 3 of 7") < 2:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        said = len(caplog.records)
        time.sleep(0.05)
        assert len(caplog.records) == said, "nothing is logged after its end"


def test_short_stages_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), listening(LoggedStages()), stage("reading weights"):
        pass
    assert caplog.text == ""
