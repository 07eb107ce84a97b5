"""The store of one process: pending responses are found, failures cost no more than what fails, dead owners show."""

import asyncio
import logging
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.server.response_store import store as store_module
from roseinfer.server.response_store.records import Key, StoreBounds, StoredResponse, StoreFailedError
from roseinfer.server.response_store.store import SqliteStore, check_file
from tests.server.response_store.test_database import WIDE, record

Opener = Callable[..., SqliteStore]


class Counted:
    """A `StoreObserver`."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def stored(self, count: int) -> None:
        self._add("stored", count)

    def not_stored(self, reason: str) -> None:
        self._add(reason, 1)

    def removed(self, reason: str, count: int) -> None:
        self._add(reason, count)

    def _add(self, name: str, count: int) -> None:
        if count:
            self.counts[name] = self.counts.get(name, 0) + count


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def open_store(tmp_path: Path, counted: Counted) -> Iterator[Opener]:
    opened: list[SqliteStore] = []

    def opening(bounds: StoreBounds = WIDE) -> SqliteStore:
        opened.append(SqliteStore(tmp_path / "db", bounds, counted))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


class Held:
    """Gate that keeps the writer from writing until it is released."""

    def __init__(self, store: SqliteStore) -> None:
        self.released = threading.Event()
        write = store.writer.write

        def held(rows: Any) -> Any:
            assert self.released.wait(60)
            return write(rows)

        store.writer.write = held  # type: ignore[method-assign]


def get(store: SqliteStore, key: Key) -> StoredResponse | None:
    return asyncio.run(store.get(key))


def test_a_response_is_found_before_it_is_written_and_by_others_after(open_store: Opener) -> None:
    first, second = open_store(), open_store()
    held = Held(first)
    first.put(record("a"))
    assert get(first, Key("", "a")) == record("a") and get(second, Key("", "a")) is None
    held.released.set()
    first.close()
    assert first.pending(Key("", "a")) is None and get(second, Key("", "a")) == record("a")


def test_a_later_version_replaces_an_earlier_one(open_store: Opener, counted: Counted) -> None:
    first, second = open_store(), open_store()
    first.put(record("a", text="old"))
    first.put(record("a", text="new"))
    assert get(first, Key("", "a")) == record("a", text="new")
    first.close()
    assert get(second, Key("", "a")) == record("a", text="new")
    assert counted.counts == {"stored": 2} and asyncio.run(second.totals()).responses == 1


def test_deleting_what_is_pending(open_store: Opener, counted: Counted) -> None:
    store, other = open_store(), open_store()
    held = Held(store)
    store.put(record("a"))

    async def deleted() -> bool:
        deleting = asyncio.create_task(store.delete(Key("", "a")))
        await asyncio.sleep(0)
        held.released.set()
        return await deleting

    assert asyncio.run(deleted())
    assert get(store, Key("", "a")) is None and get(other, Key("", "a")) is None
    assert not asyncio.run(store.delete(Key("", "a")))
    assert counted.counts == {"stored": 1, "deleted": 1}


def test_what_the_writer_cannot_follow_is_not_stored(
    open_store: Opener, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_PENDING_COUNT", 3)
    store = open_store()
    held = Held(store)
    for number in range(5):
        store.put(record(f"r{number}"))
    assert counted.counts == {"queue_full": 2}
    assert get(store, Key("", "r4")) is None
    held.released.set()
    store.close()
    assert counted.counts == {"queue_full": 2, "stored": 3}


def test_bytes_that_wait_are_bounded_and_given_back(open_store: Opener, counted: Counted) -> None:
    store = open_store()
    held = Held(store)
    large = store_module.MAX_PENDING_BYTES // 2 + 1
    store.put(replace(record("a"), size=large))
    store.put(replace(record("b"), size=large))
    assert counted.counts == {"queue_full": 1}
    held.released.set()
    asyncio.run(store.delete(Key("", "a")))  # after it
    store.put(replace(record("b"), size=large))
    store.close()
    assert counted.counts == {"queue_full": 1, "stored": 2, "deleted": 1}


def test_what_is_too_large_or_too_deep_costs_only_itself(open_store: Opener, counted: Counted) -> None:
    store = open_store(StoreBounds(max_count=10, max_bytes=5000, max_age_s=10.0))
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    store.put(record("kept"))
    store.put(record("large", text="x" * 5000))
    store.put(StoredResponse("", "deep", {"status": "completed"}, [{"content": deep}]))
    store.put(record("kept too"))
    store.close()
    assert counted.counts == {"stored": 2, "too_large": 1, "unwritable": 1}


def test_a_failing_file_is_logged_once_and_counted(
    open_store: Opener, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    written = store.writer.write

    def full(rows: Any) -> Any:
        if any(row.key.id == "bad" for row in rows):
            raise sqlite3.OperationalError("database or disk is full")
        return written(rows)

    store.writer.write = full  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        for id in ("a", "bad", "b", "bad", "c"):
            store.put(record(id))
        store.close()
    assert counted.counts == {"stored": 3, "failed": 2}
    assert [line.getMessage() for line in caplog.records] == [
        "responses are not stored (failed): database or disk is full"
    ]


def test_a_damaged_file_fails_reads_by_name_and_no_write_raises(
    open_store: Opener, counted: Counted, tmp_path: Path
) -> None:
    store = open_store()
    store.put(record("a", text="x" * 100_000))
    asyncio.run(store.delete(Key("", "none")))  # after it
    for name in ("db", "db-wal"):
        (tmp_path / name).write_bytes(b"\xff" * (tmp_path / name).stat().st_size)
    store.reader.close()
    with pytest.raises(StoreFailedError):
        get(store, Key("", "a"))
    store.put(record("b"))
    store.close()


def test_files_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    for path in (tmp_path / "text", tmp_path / "missing" / "db", tmp_path):
        with pytest.raises(ConfigError, match=r"^response_store: '.*' cannot be used: \S.*$"):
            check_file(path, WIDE)


_DIES = """
import os, signal, sys, time
from pathlib import Path
from roseinfer.server.response_store.store import SqliteStore
from tests.server.response_store.test_database import WIDE, record
from tests.server.response_store.test_store import Counted

store = SqliteStore(Path(sys.argv[1]), WIDE, Counted())
store.put(record("run", status="in_progress", process=store.process))
store.put(record("done"))
while store.pending(record("done").key):
    time.sleep(0.001)
print("written", flush=True)
sys.stdin.read()
"""


def test_responses_of_a_killed_process_have_failed(open_store: Opener, tmp_path: Path) -> None:
    store = open_store()
    with subprocess.Popen(
        [sys.executable, "-c", _DIES, str(tmp_path / "db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        running = get(store, Key("", "run"))
        assert running is not None and running.response["status"] == "in_progress", "its process lives"
        process.kill()
        process.wait()
    failed = get(store, Key("", "run"))
    assert failed is not None and failed.response["status"] == "failed"
    error = failed.response["error"]
    assert (error["code"], error["retryable"], failed.process) == ("server_error", True, "")
    assert get(store, Key("", "done")) == record("done")
    store.close()
    assert get(open_store(), Key("", "run")) == failed, "and stays so"
    assert not list(tmp_path.glob(f"*-process-{running.process}")), "nothing of it is left"
