"""Shared rows: what is read is what was written, whole, whatever becomes of who writes."""

import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.cluster.status import EngineStatus
from roseinfer.core.errors import ResourceError
from roseinfer.core.promise import DUE_S, Promise
from roseinfer.engine import board as module
from roseinfer.engine.api import EngineState
from roseinfer.engine.board import Board
from tests.helpers.promises import whole

floats = st.floats(allow_nan=False)
counts = st.integers(0, 2**62)
FIELDS = {
    "cost_s": st.tuples(floats, floats, floats, floats),
    "waiting_tokens": st.tuples(*(counts for _ in DUE_S)),
    "draining": st.booleans(),
    **{name: counts for name, kind in Promise.__annotations__.items() if kind is int},
    **{name: floats for name, kind in Promise.__annotations__.items() if kind is float},
}
promises = st.fixed_dictionaries(FIELDS).map(lambda fields: Promise(**fields))


def test_there_is_nothing_before_the_first_promise_and_after_it_is_cleared(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 2)
    assert board.promise(0) is None and board.status(1) == EngineStatus(EngineState.STARTING, 0)
    board.publish(0, whole(1))
    board.clear(0)
    assert board.promise(0) is None and board.promise(1) is None
    board.publish(0, whole(2))
    assert board.promise(0) == whole(2)
    board.close()


@settings(max_examples=40)
@given(writes=st.lists(st.tuples(st.integers(0, 2), promises), max_size=8))
def test_the_newest_promise_of_each_engine_is_read(writes: list[tuple[int, Promise]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        board = Board.create(Path(folder, "board"), 3)
        reader = Board.open(Path(folder, "board"))
    newest: dict[int, Promise] = {}
    for engine, promise in writes:
        board.publish(engine, promise)
        newest[engine] = promise
        assert {i: reader.promise(i) for i in range(3)} == {i: newest.get(i) for i in range(3)}
    assert [reader.write_count(i) for i in range(3)] == [sum(e == i for e, _ in writes) for i in range(3)]
    reader.close()
    board.close()


def test_what_the_owner_says_is_read_by_others(tmp_path: Path) -> None:
    board, other = Board.create(tmp_path / "board", 2), Board.open(tmp_path / "board")
    for state in EngineState:
        for final in (False, True):
            board.set_status(1, EngineStatus(state, 2**40, final))
            assert other.status(1) == EngineStatus(state, 2**40, final)
    assert other.status(0) == EngineStatus() and other.promise(1) is None
    board.close()
    other.close()


def test_a_write_that_was_cut_short_hides_nothing(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 1)
    for k in (1, 2, 3):
        board.publish(0, whole(k))
        slot = board._slot(0, k + 1)
        for size in (1, 8, 100, module._SLOT_BYTES):  # so much of the next had been written
            board._memory[slot : slot + size] = bytes(random.randbytes(size))
            assert board.promise(0) == whole(k)
    board.close()


def test_a_row_that_two_have_written_is_none_until_it_is_written_again(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 1)
    board.publish(0, whole(1))
    middle = board._slot(0, 1) + module._SLOT.size // 2
    board._memory[middle : middle + 8] = struct.pack("<d", -inf)
    assert board.promise(0) is None
    board.publish(0, whole(2))
    assert board.promise(0) == whole(2)
    board.close()


def test_a_file_that_is_no_board_of_this_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "board"
    with pytest.raises(ResourceError, match="cannot read"):
        Board.open(path)
    path.touch()
    with pytest.raises(ResourceError, match="cannot read"):
        Board.open(path)
    path.write_bytes(b"x" * 1000)
    with pytest.raises(ResourceError, match="another version"):
        Board.open(path)
    path.unlink()
    Board.create(path, 1).close()
    with pytest.raises(ResourceError, match="cannot make"):
        Board.create(path, 1)
    data = path.read_bytes()
    path.write_bytes(data[:-64])
    with pytest.raises(ResourceError, match="another version"):
        Board.open(path)


def test_there_is_no_row_for_other_engines(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 2)
    for engine in (-1, 2):
        with pytest.raises(KeyError):
            board.publish(engine, whole(1))
    board.close()


WRITER = """
import sys
from pathlib import Path
from roseinfer.engine.board import Board
from tests.helpers.promises import whole
board = Board.open(Path(sys.argv[1]))
promises = [whole(k) for k in range(1000)]
print(flush=True)
while True:
    for promise in promises:
        board.publish(0, promise)
"""


def test_no_reader_sees_half_a_promise_however_its_writer_ends(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", 1)
    root = Path(module.__file__).parents[2]
    for end in (signal.SIGSTOP, signal.SIGKILL):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "board")]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
        assert writer.stdout is not None
        writer.stdout.readline()
        while board.promise(0) is None:
            pass
        seen = set()
        for _ in range(10_000):
            promise = board.promise(0)
            if promise is not None:  # it was written several times while it was read
                assert promise == whole(promise.steps)
                seen.add(promise.steps)
        assert len(seen) > 1
        writer.send_signal(end)
        if end is signal.SIGSTOP:
            os.waitpid(writer.pid, os.WUNTRACED)
            assert board.promise(0) is not None and board.promise(0) == board.promise(0)
            writer.kill()
        writer.wait()
        writer.stdout.close()
        last = board.promise(0)
        assert last is not None and last == whole(last.steps)
    board.publish(0, whole(7))
    assert board.promise(0) == whole(7), "another writer goes on"
    board.close()
