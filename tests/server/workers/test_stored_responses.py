"""Stored responses with two API processes: both know all responses, and one may die."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.server.response_store.records import Key
from tests.server.real_server import RealServer, priced, until
from tests.server.response_store.test_database import opened

pytestmark = pytest.mark.long

WORKERS = 2
PATH = "/v1/responses"
LONG: dict[str, Any] = {"model": "tiny", "input": "def f(", "background": True, "max_output_tokens": 400}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("fleet")
    options = ("--response-store", str(folder / "responses.db"), "--response-store-max-count", "50")
    with RealServer("--api-workers", str(WORKERS), *priced(folder, step_s=0.02), *options) as server:
        yield server


def test_each_process_finds_responses_of_all(fleet: RealServer) -> None:
    """Each call has a connection of its own, and so goes to another process, without waiting for pending writes."""
    id = None
    for turn in range(6):
        with fleet.client() as client:
            response = client.responses.create(
                model="tiny", input=f"turn {turn}", previous_response_id=id, max_output_tokens=2
            )
            id = response.id
        for _ in range(WORKERS):
            assert fleet.fresh(f"{PATH}/{id}").json()["id"] == id
    items = fleet.fresh(f"{PATH}/{id}/input_items?limit=100").json()["data"]
    texts = [item["content"][0]["text"] for item in items if item["type"] == "message" and item["role"] == "user"]
    assert texts == [f"turn {turn}" for turn in reversed(range(6))]
    with fleet.client() as client:
        client.responses.delete(id)
    assert [fleet.fresh(f"{PATH}/{id}").status_code for _ in range(2 * WORKERS)] == [404] * 2 * WORKERS


def test_each_process_can_end_responses_of_all(fleet: RealServer) -> None:
    ends: list[Any] = ["cancel"] * WORKERS + ["delete"] * WORKERS
    ids = []
    for _ in ends:
        with fleet.client() as client:
            ids.append(client.responses.create(**LONG, extra_body={"ignore_eos": True}).id)
    for end, id in zip(ends, ids, strict=True):
        with fleet.client() as client:
            if end == "delete":
                client.responses.delete(id)
                continue
            assert client.responses.cancel(id).status == "cancelled"
        for _ in range(WORKERS):
            assert fleet.fresh(f"{PATH}/{id}").json()["status"] == "cancelled"
    until(lambda: fleet.fresh("/load").json() == {"server_load": 0})
    gone = [id for end, id in zip(ends, ids, strict=True) if end == "delete"]
    assert [fleet.fresh(f"{PATH}/{id}").status_code for id in gone] == [404] * len(gone)


def test_running_responses_of_a_killed_process_have_failed(fleet: RealServer) -> None:
    running = []
    for _ in range(2 * WORKERS):
        with fleet.client() as client:
            running.append(client.responses.create(**LONG, extra_body={"ignore_eos": True}).id)
    victim = fleet.workers()[0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(set(fleet.workers()) - {victim}) == WORKERS)
    statuses: list[str] = []

    def known() -> bool:
        try:
            statuses[:] = [fleet.fresh(f"{PATH}/{id}").json()["status"] for id in running]
        except Exception:  # a connection that the killed process had
            return False
        return True

    until(known)
    assert statuses.count("failed") == WORKERS, statuses
    failed = running[statuses.index("failed")]
    with fleet.client() as client:
        response = client.responses.retrieve(failed)
        assert response.error is not None and response.error.code == "server_error"
        for id in running:
            client.responses.cancel(id)
    until(lambda: fleet.fresh("/load").json() == {"server_load": 0})


def test_the_store_survives_a_restart_and_a_temporary_one_leaves_nothing(tmp_path: Path) -> None:
    stored = ("--response-store", str(tmp_path / "responses.db"))
    with RealServer(*priced(tmp_path), *stored) as server:
        done = server.client().responses.create(model="tiny", input="x", max_output_tokens=2).id
        running = server.client().responses.create(**LONG, extra_body={"ignore_eos": True}).id
        server.process.kill()
        server.process.wait()
    with RealServer(*priced(tmp_path), *stored, "--api-workers", "2", "--shutdown-timeout", "0") as server:
        assert server.fresh(f"{PATH}/{done}").json()["status"] == "incomplete"
        assert server.fresh(f"{PATH}/{running}").json()["status"] == "failed"
        running = server.client().responses.create(**LONG, extra_body={"ignore_eos": True}).id
        server.process.terminate()
        assert server.exit_code() == 0
    database = opened(tmp_path / "responses.db")
    ended = database.get(Key("", running))
    database.close()
    assert ended is not None and ended.response["status"] == "failed" and ended.response["error"]["code"] == "draining"
    left = sorted(path.name for path in tmp_path.iterdir() if path.name != "cost.json")
    assert left == ["responses.db"], "the processes' own files are gone"
    with RealServer(*priced(tmp_path)) as server:
        server.client().responses.create(model="tiny", input="x", max_output_tokens=2)
        assert any(Path(folder).name.startswith("roseinfer-") for folder in server.left_behind())
        server.process.terminate()
        server.exit_code()
        assert server.left_behind() == []


def test_an_unusable_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database " * 100)
    for workers in ("1", "2"):
        server = RealServer("--api-workers", workers, *priced(tmp_path), "--response-store", str(tmp_path / "text"))
        try:
            assert server.exit_code() != 0
            *_, last = server.log().splitlines()
            assert last.endswith(f"--response-store: '{tmp_path / 'text'}' cannot be used: file is not a database")
            assert "Traceback" not in server.log()
        finally:
            server.close()
