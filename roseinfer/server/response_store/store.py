"""Store of one API process: a thread that writes, a thread that reads, and the responses not yet written."""

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import orjson

from roseinfer.core.errors import ConfigError
from roseinfer.server.response_store.database import Database, ForeignFileError, ResponseRow
from roseinfer.server.response_store.liveness import ProcessMark
from roseinfer.server.response_store.records import (
    Key,
    StoreBounds,
    StoredResponse,
    StoreFailedError,
    StoreObserver,
    Totals,
)

log = logging.getLogger(__name__)

# What may wait for the writer; more is not stored.
MAX_PENDING_COUNT = 4096
MAX_PENDING_BYTES = 64 * 2**20
# Written in one transaction.
MAX_BATCH_COUNT = 128
# Between two looks for what has expired, if nothing is written.
EXPIRY_INTERVAL_S = 600.0
LOG_INTERVAL_S = 60.0
CLOSE_TIMEOUT_S = 10.0
_ENDED = {
    "code": "server_error",
    "message": "The server process that ran this response has ended",
    "retryable": True,
}

Result = TypeVar("Result")


class _Delete(NamedTuple):
    key: Key
    done: "Future[bool]"


class _Flush(NamedTuple):
    done: "Future[None]"


def check_file(path: Path, bounds: StoreBounds) -> None:
    """Create the file if there is none. Raises `ConfigError` if it cannot be used."""
    _open(path, bounds, durable=True).close()


def _open(path: Path, bounds: StoreBounds, durable: bool) -> Database:
    try:
        return Database(path, bounds, durable, time.time)
    except (OSError, sqlite3.Error, ForeignFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"response_store: {str(path)!r} cannot be used: {reason}") from error


class SqliteStore:
    """Store of one process. `put` and `pending` may be called in any thread, the others in the event loop's.

    `durable`: a power failure loses nothing. Raises `ConfigError` if the file cannot be used.
    """

    def __init__(self, path: Path, bounds: StoreBounds, observer: StoreObserver, *, durable: bool = False) -> None:
        self._bounds = bounds
        self._observer = observer
        self.writer = _open(path, bounds, durable)
        self.reader = _open(path, bounds, durable)
        try:
            self._mark = ProcessMark(path)
        except OSError as error:
            raise ConfigError(
                f"response_store: no file can be locked beside {str(path)!r}: {error.strerror}"
            ) from error
        self._queue: queue.SimpleQueue[StoredResponse | _Delete | _Flush | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending: dict[Key, StoredResponse] = {}
        self._pending_bytes = 0
        self._closed = False
        self._logged_s: dict[str, float] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="roseinfer-responses-read")
        self._writer = threading.Thread(target=self._run, name="roseinfer-responses-write", daemon=True)
        self._writer.start()

    @property
    def process(self) -> str:
        """Token of this process. Responses that it runs are known to have failed once it has ended."""
        return self._mark.token

    # --- from any thread ----------------------------------------------------------------------------------------
    def put(self, record: StoredResponse) -> None:
        """Store a response some time later, in place of one with the same key.

        Never raises: failures are counted and logged.
        """
        with self._lock:
            if self._closed:
                return
            crowded = len(self._pending) >= MAX_PENDING_COUNT or self._pending_bytes + record.size > MAX_PENDING_BYTES
            if not crowded:
                self._pending[record.key] = record
                self._pending_bytes += record.size
                self._queue.put(record)
                return
        self._not_stored("queue_full", "the file takes less than there is to store")

    def pending(self, key: Key) -> StoredResponse | None:
        """Return a response that was `put` and is not in the file yet."""
        return self._pending.get(key)

    def _not_stored(self, reason: str, why: object) -> None:
        self._observer.not_stored(reason)
        now_s = time.monotonic()
        if now_s - self._logged_s.get(reason, -LOG_INTERVAL_S) >= LOG_INTERVAL_S:
            self._logged_s[reason] = now_s
            log.warning("responses are not stored (%s): %s", reason, why)

    # --- from the event loop ------------------------------------------------------------------------------------
    async def get(self, key: Key) -> StoredResponse | None:
        """Return a response, None if it is unknown or has expired. Raises `StoreFailedError`."""
        return self.pending(key) or await self._read(lambda: self._find(key))

    async def written(self) -> None:
        """Wait until all responses that were `put` are in the file or have failed."""
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                return
            self._queue.put(_Flush(done))
        await asyncio.wrap_future(done)

    async def delete(self, key: Key) -> bool:
        """Delete a response. Return whether there was one. Raises `StoreFailedError`."""
        return await asyncio.wrap_future(self.delete_later(key))

    def delete_later(self, key: Key) -> "Future[bool]":
        """Delete a response after the earlier calls of `put`. The result, as of `delete`, need not be awaited."""
        done: Future[bool] = Future()
        with self._lock:
            self._pending.pop(key, None)
            if self._closed:
                done.set_exception(StoreFailedError("the store is closed"))
            else:
                self._queue.put(_Delete(key, done))
        return done

    async def totals(self) -> Totals:
        """Return the totals of all processes. Raises `StoreFailedError`."""
        return await self._read(self.reader.totals)

    async def _read(self, work: Callable[[], Result]) -> Result:
        def guarded() -> Result:
            try:
                return work()
            except sqlite3.Error as error:
                raise StoreFailedError(str(error)) from error

        return await asyncio.get_running_loop().run_in_executor(self._reader, guarded)

    def close(self) -> None:
        """Write pending responses. Blocks, so it must not run in the event loop."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._writer.join(CLOSE_TIMEOUT_S)
        self._reader.shutdown()
        if not self._writer.is_alive():
            self.writer.close()
        self.reader.close()
        self._mark.close()

    # --- in the reading thread ----------------------------------------------------------------------------------
    def _find(self, key: Key) -> StoredResponse | None:
        found = self.reader.get(key)
        if found is None or not self._abandoned(found):
            return found
        found = self.reader.get(key)  # again: its process may have ended just after it had written the end
        if found is None or not self._abandoned(found):
            return found
        failed = replace(found, response=found.response | {"status": "failed", "error": _ENDED}, process="")
        self.put(failed)
        return failed

    def _abandoned(self, record: StoredResponse) -> bool:
        return record.running and not self._mark.alive(record.process)

    # --- in the writing thread ----------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            try:
                work = [self._queue.get(timeout=EXPIRY_INTERVAL_S)]
            except queue.Empty:
                self._write([])
                continue
            while len(work) < MAX_BATCH_COUNT and not self._queue.empty():
                work.append(self._queue.get())
            puts: list[StoredResponse] = []
            for each in work:
                if isinstance(each, StoredResponse):
                    puts.append(each)
                    continue
                self._write(puts)
                puts = []
                if each is None:
                    return
                if isinstance(each, _Flush):
                    each.done.set_result(None)
                else:
                    self._delete(each)
            if puts:
                self._write(puts)

    def _write(self, puts: list[StoredResponse]) -> None:
        try:
            self._write_rows([row for put in puts if (row := self._row(put)) is not None])
        except Exception as error:  # a bug must not end the thread
            log.exception("responses are not stored: %s", error)
        finally:
            self._settle(puts)

    def _row(self, record: StoredResponse) -> ResponseRow | None:
        try:
            row = ResponseRow.of(record)
        except orjson.JSONEncodeError as error:
            self._not_stored("unwritable", error)
            return None
        if row.size > self._bounds.max_bytes:
            self._not_stored("too_large", f"one has {row.size} bytes")
            return None
        return row

    def _write_rows(self, rows: list[ResponseRow]) -> None:
        try:
            removed = self.writer.write(rows)
        except sqlite3.Error as error:
            if len(rows) < 2:
                self._not_stored("failed", error)
                return
            for row in rows:  # the failure of one must not cost the others
                self._write_rows([row])
            return
        self._observer.stored(len(rows))
        self._observer.removed("expired", removed.expired)
        self._observer.removed("evicted", removed.evicted)

    def _settle(self, puts: list[StoredResponse]) -> None:
        with self._lock:
            for record in puts:
                self._pending_bytes -= record.size
                if self._pending.get(record.key) is record:
                    del self._pending[record.key]

    def _delete(self, wanted: _Delete) -> None:
        try:
            deleted = self.writer.delete(wanted.key)
        except sqlite3.Error as error:
            wanted.done.set_exception(StoreFailedError(str(error)))
            return
        self._observer.removed("deleted", deleted)
        wanted.done.set_result(deleted)
