"""Rows of a server's engines: promises as engines write them, and the supervisor's status of each."""

from pathlib import Path

from roseinfer.cluster.engine_rows import EngineRows
from roseinfer.cluster.status import EngineStatus
from roseinfer.engine.api import EngineState
from roseinfer.engine.process_transport import ENGINE_ROWS
from roseinfer.processes.shared_rows import SharedRows
from tests.helpers.promises import whole


def test_every_process_reads_the_promises_of_engines(tmp_path: Path) -> None:
    rows = EngineRows.create(tmp_path / "rows", 2)
    engine, server = SharedRows.open(tmp_path / "rows", ENGINE_ROWS), EngineRows.open(tmp_path / "rows")
    engine.write(1, whole(3))
    assert [server.promise(i) for i in range(2)] == [None, whole(3)] and server.write_count(1) == 1
    rows.clear(1)
    assert server.promise(1) is None and server.write_count(1) == 2
    for opened in (rows, engine, server):
        opened.close()


def test_every_process_reads_the_status_that_the_supervisor_writes(tmp_path: Path) -> None:
    rows, other = EngineRows.create(tmp_path / "rows", 2), EngineRows.open(tmp_path / "rows")
    for state in EngineState:
        for final in (False, True):
            rows.set_status(1, EngineStatus(state, 2**40, final, pid=77))
            assert other.status(1) == EngineStatus(state, 2**40, final, pid=77)
    assert other.status(0) == EngineStatus() and other.promise(1) is None
    rows.close()
    other.close()
