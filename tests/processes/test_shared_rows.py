"""Shared rows: readers get what was written, whole, whatever becomes of the writer."""

import os
import random
import signal
import struct
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.core.errors import ResourceError
from roseinfer.processes import shared_rows as module
from roseinfer.processes.shared_rows import RowLayout, SharedRows


class Pair(NamedTuple):
    first: float = 0.0
    second: float = 0.0


class Numbers(NamedTuple):
    share: float = 0.0
    pair: Pair = Pair()
    steps: int = 0
    many: tuple[int, ...] = (0,) * 20
    ready: bool = False


class Count(IntEnum):
    REQUESTS = 0
    BEATS = 1


LAYOUT = RowLayout(words=2, record=Numbers())
floats = st.floats(allow_nan=False)
counts = st.integers(-(2**62), 2**62)
records = st.builds(Numbers, floats, st.builds(Pair, floats, floats), counts, st.tuples(*[counts] * 20), st.booleans())


def whole(k: int) -> Numbers:
    """Return a record all of whose fields follow from `k`."""
    return Numbers(k / 3, Pair(k + 0.5, -k), k, tuple(k * i for i in range(20)), k % 2 == 1)


def made(path: Path, rows: int = 1) -> SharedRows[Numbers]:
    return SharedRows.create(path / "rows", LAYOUT, rows)


def test_there_is_nothing_before_the_first_record_and_after_it_is_deleted(tmp_path: Path) -> None:
    rows = made(tmp_path, 2)
    assert rows.read(0) is None and rows.written(0) == 0
    rows.write(0, whole(1))
    rows.write(0, None)
    assert rows.read(0) is None and rows.read(1) is None
    rows.write(0, whole(2))
    found = rows.read(0)
    assert found == whole(2) and found.pair.second == -2.0 and rows.written(0) == 3
    rows.close()


@settings(max_examples=40)
@given(writes=st.lists(st.tuples(st.integers(0, 2), records), max_size=8))
def test_the_newest_record_of_each_row_is_read(tmp_path_factory: pytest.TempPathFactory, writes: list) -> None:
    path = tmp_path_factory.mktemp("rows")
    rows, reader = made(path, 3), SharedRows.open(path / "rows", LAYOUT)
    newest: dict[int, Numbers] = {}
    for row, record in writes:
        rows.write(row, record)
        newest[row] = record
        assert {i: reader.read(i) for i in range(3)} == {i: newest.get(i) for i in range(3)}
    assert [reader.written(i) for i in range(3)] == [sum(row == i for row, _ in writes) for i in range(3)]
    reader.close()
    rows.close()


def test_words_are_counted_for_themselves_and_over_all_rows(tmp_path: Path) -> None:
    for layout in (LAYOUT, RowLayout[Numbers](words=len(Count))):
        path = tmp_path / f"rows{layout.record is None}"
        rows = SharedRows.create(path, layout, 3)
        descriptor = os.open(path, os.O_RDWR)
        path.unlink()
        other = SharedRows(descriptor, layout, 3)  # inherited by a child
        os.close(descriptor)
        for row in range(3):
            rows.add(row, Count.REQUESTS, 10 + row)
            other.set(row, Count.BEATS, 2**62 + row)
        assert other.total(Count.REQUESTS) == 33 and rows.get(1, Count.BEATS) == 2**62 + 1
        rows.clear(1)
        assert other.total(Count.REQUESTS) == 22 and [other.get(1, word) for word in Count] == [0, 0]
        rows.close()
        other.close()


def test_a_write_that_was_cut_short_hides_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    rows = made(tmp_path)
    for k in (1, 2, 3):
        rows.write(0, whole(k))
        before = file.read_bytes()
        rows.write(0, whole(k + 1))
        changed = [i for i, (old, new) in enumerate(zip(before, file.read_bytes(), strict=True)) if old != new]
        count, slot = changed[0], changed[1:]  # the word that makes the record the newest, and its bytes
        with file.open("r+b", buffering=0) as opened:
            os.pwrite(opened.fileno(), before[count : count + 1], count)
            for size in (1, 8, len(slot) // 2, len(slot)):
                os.pwrite(opened.fileno(), random.randbytes(slot[size - 1] + 1 - slot[0]), slot[0])
                assert rows.read(0) == whole(k)
    rows.close()


def test_a_record_that_two_have_written_is_none_until_it_is_written_again(tmp_path: Path) -> None:
    rows = made(tmp_path)
    rows.write(0, whole(3))
    data = (tmp_path / "rows").read_bytes()
    with (tmp_path / "rows").open("r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), struct.pack("<q", 99), data.index(struct.pack("<q", 3 * 7)))
    assert rows.read(0) is None
    rows.write(0, whole(2))
    assert rows.read(0) == whole(2)
    rows.close()


def test_a_file_of_another_layout_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with pytest.raises(ResourceError, match=r"cannot read shared memory .*No such file"):
        SharedRows.open(path, LAYOUT)
    for content in (b"", b"x" * 1000):
        path.write_bytes(content)
        with pytest.raises(ResourceError, match="another version"):
            SharedRows.open(path, LAYOUT)
    path.unlink()
    made(tmp_path).close()
    with pytest.raises(ResourceError, match=r"cannot create .*set TMPDIR"):
        made(tmp_path)
    for other in (LAYOUT._replace(words=3), LAYOUT._replace(tag="x"), RowLayout(words=2), RowLayout(2, (1.0,))):
        with pytest.raises(ResourceError, match="another version"):
            SharedRows.open(path, other)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ResourceError, match="another version"):
        SharedRows.open(path, LAYOUT)


def test_other_rows_do_not_exist(tmp_path: Path) -> None:
    rows = made(tmp_path, 2)
    for row in (-1, 2):
        with pytest.raises(KeyError):
            rows.write(row, whole(1))
        with pytest.raises(KeyError):
            rows.add(row, Count.BEATS, 1)
    rows.close()


WRITER = """
import sys
from pathlib import Path
from roseinfer.processes.shared_rows import SharedRows
from tests.processes.test_shared_rows import LAYOUT, whole
rows = SharedRows.open(Path(sys.argv[1]), LAYOUT)
records = [whole(k) for k in range(1000)]
print(flush=True)
while True:
    for record in records:
        rows.write(0, record)
"""


def test_no_reader_gets_half_a_record_however_its_writer_ends(tmp_path: Path) -> None:
    rows = made(tmp_path)
    root = Path(module.__file__).parents[2]
    for end in (signal.SIGSTOP, signal.SIGKILL):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "rows")]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
        assert writer.stdout is not None
        writer.stdout.readline()
        while rows.read(0) is None:
            pass
        seen = set()
        for _ in range(10_000):
            record = rows.read(0)
            if record is not None:  # it was written several times while it was read
                assert record == whole(record.steps)
                seen.add(record.steps)
        assert len(seen) > 1
        writer.send_signal(end)
        if end is signal.SIGSTOP:
            os.waitpid(writer.pid, os.WUNTRACED)
            assert rows.read(0) is not None and rows.read(0) == rows.read(0)
            writer.kill()
        writer.wait()
        writer.stdout.close()
        last = rows.read(0)
        assert last is not None and last == whole(last.steps)
    rows.write(0, whole(7))
    assert rows.read(0) == whole(7), "another writer continues"
    rows.close()
