"""The file of stored responses against a model of plain Python, and what it refuses."""

import os
import random
import sqlite3
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roseinfer.server.response_store.database import MAX_JOURNAL_BYTES, Database, ForeignFileError, ResponseRow
from roseinfer.server.response_store.records import Key, StoreBounds, StoredResponse, Totals

WIDE = StoreBounds(max_count=1000, max_bytes=2**20, max_age_s=1000.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def record(id: str, owner: str = "", text: str = "x", status: str = "completed", process: str = "") -> StoredResponse:
    response = {"id": id, "status": status, "output": [text]}
    return StoredResponse(owner, id, response, b'[{"role":"user","content":"%b"}]' % text.encode(), process)


def opened(path: Path, bounds: StoreBounds = WIDE, clock: Clock | None = None) -> Database:
    return Database(path, bounds, False, clock or Clock())


def test_what_is_written_is_read_by_its_owner_only(tmp_path: Path) -> None:
    database = opened(tmp_path / "db")
    mine = record("resp_1", owner="abc")
    database.write([ResponseRow.of(mine)])
    assert database.get(Key("abc", "resp_1")) == mine
    assert database.get(Key("", "resp_1")) is None and database.get(Key("xyz", "resp_1")) is None
    assert not database.delete(Key("xyz", "resp_1")) and database.get(mine.key) == mine
    given = StoredResponse("abc", "resp_2", {"status": "completed"}, [{"role": "user", "content": "ü"}])
    database.write([ResponseRow.of(given)])
    read = database.get(given.key)
    assert read is not None and read.input() == given.input() == given.items and read.size > 40


def test_the_file_is_private_and_holds_no_digest_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "db"
    database = opened(path)
    database.write([ResponseRow.of(record("resp_1", owner="digest-of-a-key"))])
    database.close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert b"digest-of-a-key" not in path.read_bytes()


def test_a_second_process_sees_what_the_first_wrote(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "db"), opened(tmp_path / "db")
    first.write([ResponseRow.of(record("a", "me"))])
    second.write([ResponseRow.of(record("b", "me"))])
    assert second.get(Key("me", "a")) == record("a", "me") and first.get(Key("me", "b")) == record("b", "me")
    assert first.totals().responses == second.totals().responses == 2
    assert second.delete(Key("me", "a")) and first.get(Key("me", "a")) is None


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_agree_with_a_model(tmp_path: Path, seed: int) -> None:
    """The model: a dict in the order of writes. Expired ones go, then the first of who has most of what is exceeded."""
    rng, clock = random.Random(seed), Clock()
    bounds = StoreBounds(max_count=rng.randint(1, 8), max_bytes=rng.randint(1500, 6000), max_age_s=50.0)
    databases = [opened(tmp_path / "db", bounds, clock) for _ in range(2)]
    model: dict[Key, tuple[float, ResponseRow, StoredResponse]] = {}

    def make_room() -> list[Key]:
        gone = [key for key in model if model[key][0] < clock.now_s - bounds.max_age_s]
        for key in gone:
            del model[key]
        while True:
            counts, sizes = Counter[str](), Counter[str]()
            for key, (_, row, _) in model.items():
                counts[key.owner] += 1
                sizes[key.owner] += row.size
            if counts.total() > bounds.max_count:
                exceeded = counts
            elif sizes.total() > bounds.max_bytes:
                exceeded = sizes
            else:
                return gone
            gone.append(next(key for key in model if exceeded[key.owner] == max(exceeded.values())))
            del model[gone[-1]]

    for _ in range(300):
        database = rng.choice(databases)
        action = rng.random()
        key = Key(rng.choice(["", "me", "you"]), f"resp_{rng.randrange(6)}")
        if action < 0.5:
            rows = []
            for _ in range(rng.randint(1, 3)):
                written = record(f"resp_{rng.randrange(6)}", rng.choice(["", "me", "you"]), "x" * rng.randrange(600))
                rows.append(ResponseRow.of(written))
                model.pop(written.key, None)
                model[written.key] = (clock.now_s, rows[-1], written)
            removed = database.write(rows)
            assert removed.expired + removed.evicted == len(make_room())
        elif action < 0.7:
            assert database.delete(key) == (model.pop(key, None) is not None)
        elif action < 0.9:
            known = model.get(key)
            fresh = known is not None and known[0] >= clock.now_s - bounds.max_age_s
            assert database.get(key) == (known[2] if known is not None and fresh else None)
        else:
            clock.now_s += rng.choice([1.0, 10.0, 60.0])
        used = sum(row.size for _, row, _ in model.values())
        assert database.totals() == Totals(len(model), used)


def test_who_stores_much_does_not_make_others_go(tmp_path: Path) -> None:
    database = opened(tmp_path / "db", StoreBounds(max_count=10, max_bytes=2**20, max_age_s=10.0))
    database.write([ResponseRow.of(record(f"resp_{number}", "modest")) for number in range(3)])
    for number in range(100):
        database.write([ResponseRow.of(record(f"resp_{number}", "greedy"))])
    assert [database.get(Key("modest", f"resp_{number}")) is not None for number in range(3)] == [True] * 3
    assert [database.get(Key("greedy", f"resp_{number}")) is not None for number in (92, 93, 99)] == [False, True, True]


def test_the_files_do_not_grow_with_what_was_removed(tmp_path: Path) -> None:
    bounds = StoreBounds(max_count=1000, max_bytes=2**20, max_age_s=10.0)
    database = opened(tmp_path / "db", bounds)
    for number in range(200):
        database.write([ResponseRow.of(record(f"resp_{number}", text="x" * 50_000))])
    taken = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert taken < 2 * bounds.max_bytes + MAX_JOURNAL_BYTES


def test_a_failed_write_leaves_all_as_it_was(tmp_path: Path) -> None:
    database = opened(tmp_path / "db")
    database.write([ResponseRow.of(record("a", text="old"))])
    with pytest.raises(sqlite3.Error):
        database.write([ResponseRow.of(record("a", text="new")), ResponseRow(Key("", "b"), None, b"", b"")])  # type: ignore[arg-type]
    assert database.get(Key("", "a")) == record("a", text="old") and database.totals().responses == 1


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("not a database, " * 100)
    with pytest.raises(sqlite3.DatabaseError):
        opened(text)
    foreign = sqlite3.connect(other)
    foreign.execute("CREATE TABLE t (x)")
    foreign.commit()
    with pytest.raises(ForeignFileError, match="another program"):
        opened(other)
    assert text.read_text() == "not a database, " * 100
    opened(tmp_path / "db").close()
    newer = sqlite3.connect(tmp_path / "db")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(ForeignFileError, match="version 99"):
        opened(tmp_path / "db")


def test_several_openers_of_a_new_file_share_it(tmp_path: Path) -> None:
    """One of them creates the tables between any two reads of another."""
    for number in range(20):
        with ThreadPoolExecutor(8) as pool:
            databases = list(pool.map(opened, [tmp_path / f"db{number}"] * 8))
        for database in databases:
            database.close()
