"""SQLite file with the responses. Calls block, and each thread needs a `Database` of its own."""

import hashlib
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from roseinfer.server.response_store.records import Key, StoreBounds, StoredResponse, Totals

# SQLite keeps it in the header of the file.
APPLICATION_ID = int.from_bytes(b"rose", "big")
FORMAT_VERSION = 1
# Estimated size of a row besides its texts.
ROW_BYTES = 256
BUSY_TIMEOUT_S = 5.0
RETRY_S = 0.005
# Of the `-wal` file between two transactions; a larger one has made it longer for its time only.
MAX_JOURNAL_BYTES = 8 * 2**20
_SALT_BYTES = 32

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE responses (
    number INTEGER PRIMARY KEY,
    owner BLOB NOT NULL,
    id TEXT NOT NULL,
    written_s REAL NOT NULL,
    size INTEGER NOT NULL,
    process TEXT NOT NULL,
    response BLOB NOT NULL,
    items BLOB NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX by_age ON responses (owner, number);
CREATE TABLE totals (owner BLOB PRIMARY KEY, count INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER stored AFTER INSERT ON responses BEGIN
    INSERT INTO totals VALUES (NEW.owner, 1, NEW.size)
        ON CONFLICT (owner) DO UPDATE SET count = count + 1, bytes = bytes + NEW.size;
END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET count = count - 1, bytes = bytes - OLD.size WHERE owner = OLD.owner;
    DELETE FROM totals WHERE owner = OLD.owner AND count = 0;
END;
"""


class ForeignFileError(Exception):
    """File that is not a response store, or that of another version."""


class ResponseRow(NamedTuple):
    """Response as it is written."""

    key: Key
    process: str
    response: bytes
    items: bytes

    @classmethod
    def of(cls, record: StoredResponse) -> "ResponseRow":
        """Encode a response. Raises `orjson.JSONEncodeError` for input that is nested too deeply."""
        items = record.items if isinstance(record.items, bytes) else orjson.dumps(record.items)
        return cls(record.key, record.process, orjson.dumps(record.response), items)

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + ROW_BYTES


class Removed(NamedTuple):
    """Rows that made room for others."""

    expired: int = 0
    evicted: int = 0


class Database:
    """Connection of one thread to the file. `durable`: a power failure loses nothing. `now`: Unix seconds.

    Raises `OSError`, `sqlite3.Error` or `ForeignFileError` if the file cannot be used.
    """

    def __init__(self, path: Path, bounds: StoreBounds, durable: bool, now: Callable[[], float]) -> None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._bounds = bounds
        self._now = now
        self._sql = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            self._salt = self._prepare(durable)
        except BaseException:
            self._sql.close()
            raise

    def _prepare(self, durable: bool) -> bytes:
        sql = self._sql
        sql.execute("BEGIN")  # one snapshot: another process may create the tables meanwhile
        found = sql.execute("PRAGMA application_id").fetchone()[0]
        tables = sql.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        sql.execute("COMMIT")
        if found != APPLICATION_ID and tables:
            raise ForeignFileError("it is the database of another program")
        self._begin_journal()
        sql.execute(f"PRAGMA synchronous = {'NORMAL' if durable else 'OFF'}")
        sql.execute(f"PRAGMA journal_size_limit = {MAX_JOURNAL_BYTES}")
        sql.execute("PRAGMA secure_delete = FAST")
        if self._version() == 0:
            self._create()
        if self._version() != FORMAT_VERSION:
            raise ForeignFileError(f"its format has version {self._version()}, and this program's {FORMAT_VERSION}")
        return bytes(sql.execute("SELECT value FROM meta WHERE name = 'salt'").fetchone()[0])

    def _begin_journal(self) -> None:
        """Switch the file to a write-ahead log. SQLite does not wait for other openers that do so at the same time."""
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._sql.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                    raise
            time.sleep(RETRY_S)

    def _version(self) -> int:
        return int(self._sql.execute("PRAGMA user_version").fetchone()[0])

    def _create(self) -> None:
        """Create the tables, unless another process has done so meanwhile."""
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            if self._version() == 0:
                for statement in _statements(_SCHEMA):
                    self._sql.execute(statement)
                self._sql.execute("INSERT INTO meta VALUES ('salt', ?)", (secrets.token_bytes(_SALT_BYTES),))
                self._sql.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._sql.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        except BaseException:
            self._rollback()
            raise
        self._sql.execute("COMMIT")

    # --- writing ------------------------------------------------------------------------------------------------
    def write(self, rows: Sequence[ResponseRow]) -> Removed:
        """Store all of `rows` or, if it raises `sqlite3.Error`, none. Rows with the same key are replaced."""
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                self._delete(row.key)
                self._sql.execute(
                    "INSERT INTO responses (owner, id, written_s, size, process, response, items) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (self._owner(row.key), row.key.id, self._now(), row.size, row.process, row.response, row.items),
                )
            removed = self._make_room()
        except BaseException:
            self._rollback()
            raise
        self._sql.execute("COMMIT")
        return removed

    def _rollback(self) -> None:
        if self._sql.in_transaction:  # some failures, such as a full disk, have ended it already
            self._sql.execute("ROLLBACK")

    def delete(self, key: Key) -> bool:
        """Delete a response. Return whether there was one."""
        return self._delete(key) > 0

    def _delete(self, key: Key) -> int:
        found = self._sql.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (self._owner(key), key.id))
        return found.rowcount

    def _make_room(self) -> Removed:
        """Remove expired rows, then rows of the largest owner while a bound is exceeded."""
        expired = evicted = 0
        oldest_s = self._now() - self._bounds.max_age_s
        while True:
            first = self._sql.execute("SELECT number, written_s FROM responses ORDER BY number LIMIT 1").fetchone()
            if first is None or first[1] >= oldest_s:
                break
            self._sql.execute("DELETE FROM responses WHERE number = ?", (first[0],))
            expired += 1
        while True:
            total = self.totals()
            if total.responses > self._bounds.max_count:
                self._evict("count")
            elif total.size > self._bounds.max_bytes:
                self._evict("bytes")
            else:
                return Removed(expired, evicted)
            evicted += 1

    def _evict(self, measure: str) -> None:
        """Remove the oldest row of the owner that has most, so that a client cannot evict those of smaller ones."""
        self._sql.execute(
            "DELETE FROM responses WHERE number = ("
            "SELECT min((SELECT min(number) FROM responses WHERE responses.owner = totals.owner)) FROM totals "
            f"WHERE {measure} = (SELECT max({measure}) FROM totals))"
        )

    # --- reading ------------------------------------------------------------------------------------------------
    def get(self, key: Key) -> StoredResponse | None:
        """Return a response; None if it is unknown or has expired."""
        found = self._sql.execute(
            "SELECT process, response, items FROM responses WHERE owner = ? AND id = ? AND written_s >= ?",
            (self._owner(key), key.id, self._now() - self._bounds.max_age_s),
        ).fetchone()
        if found is None:
            return None
        process, response, items = found
        return StoredResponse(key.owner, key.id, orjson.loads(response), items, process, len(response) + len(items))

    def totals(self) -> Totals:
        return Totals(*self._sql.execute("SELECT ifnull(sum(count), 0), ifnull(sum(bytes), 0) FROM totals").fetchone())

    def _owner(self, key: Key) -> bytes:
        """Hash the key's digest with a salt, so that the file does not show which keys are in it."""
        return hashlib.blake2b(key.owner.encode(), key=self._salt, digest_size=16).digest() if key.owner else b""

    def close(self) -> None:
        self._sql.close()


def _statements(script: str) -> list[str]:
    """Split a script into statements: `executescript` would end the transaction."""
    found, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    return found
