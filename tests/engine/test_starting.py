"""An engine process tells its log what takes long when it starts, and nothing of what does not."""

import logging
import time

import pytest

from roseinfer.core.progress import listening, stage
from roseinfer.engine import starting
from roseinfer.engine.starting import LoggedStages


def test_stages_that_last_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(starting, "SOON_S", 0.01)
    monkeypatch.setattr(starting, "BETWEEN_S", 0.01)
    with caplog.at_level(logging.INFO), listening(LoggedStages()):
        with stage("reading weights") as step:
            step(3, 7)
            deadline = time.monotonic() + 20
            while caplog.text.count("reading weights: 3 of 7") < 2:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        said = len(caplog.records)
        time.sleep(0.05)
        assert len(caplog.records) == said, "nothing comes behind its end"


def test_quick_ones_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), listening(LoggedStages()), stage("reading weights"):
        pass
    assert caplog.text == ""
