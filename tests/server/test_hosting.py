"""What each process of a server does for itself."""

import gc

import pytest

from roseinfer.server.hosting import (
    MAX_AUTO_WORKERS,
    YOUNG_OBJECTS,
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
