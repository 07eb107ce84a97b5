"""What each process of a server does for itself."""

import asyncio
import gc
import os
import signal

import pytest

from roseinfer.server.hosting import (
    MAX_AUTO_WORKERS,
    YOUNG_OBJECTS,
    Signals,
    new_event_loop,
    settle_garbage_collector,
    worker_count,
)


def test_the_event_loop_is_uvloops_where_there_is_one() -> None:
    uvloop = pytest.importorskip("uvloop")
    loop = new_event_loop()
    assert isinstance(loop, uvloop.Loop)
    loop.close()


def test_what_is_there_after_the_start_is_not_looked_through_again() -> None:
    thresholds, before = gc.get_threshold(), gc.get_freeze_count()
    try:
        there = [[] for _ in range(10_000)]
        settle_garbage_collector()
        assert gc.get_freeze_count() >= before + len(there) and gc.isenabled()
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
    finally:
        gc.set_threshold(*thresholds)


def test_how_many_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_count(7, "cpu") == 7, "what was asked for"
    for cores, device, workers in ((1, "auto", 1), (7, "cuda", 1), (8, "auto", 2), (16, "cuda", 4), (128, "auto", 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert worker_count(None, device) == workers <= MAX_AUTO_WORKERS
        assert worker_count(None, "cpu") == 1


@pytest.mark.parametrize(
    ("terminal_then", "terminal_now", "came"),
    [(False, False, "reload"), (True, True, "reload"), (True, False, "end")],
)
def test_a_hangup_restarts_engines_unless_the_terminal_is_gone(
    monkeypatch: pytest.MonkeyPatch, terminal_then: bool, terminal_now: bool, came: str
) -> None:
    async def hang_up() -> list[str]:
        heard: list[str] = []
        signals = Signals(lambda: heard.append("reload"))
        monkeypatch.setattr("os.isatty", lambda descriptor: terminal_then)
        signals.install()
        monkeypatch.setattr("os.isatty", lambda descriptor: terminal_now)
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            while not heard and not signals.first.is_set():
                await asyncio.sleep(0.001)
        return heard + ["end"] * signals.first.is_set()

    assert asyncio.run(hang_up()) == [came]


def test_a_hangup_while_it_ends_restarts_nothing() -> None:
    async def end() -> list[str]:
        heard: list[str] = []
        signals = Signals(lambda: heard.append("reload"))
        signals.install()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            await signals.second.wait()
        return heard

    assert asyncio.run(end()) == []
