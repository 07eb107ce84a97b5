"""A real engine behind its keeper's port: served, killed and started again, drained, stopped; nothing else listens."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from roseinfer.cluster import supervisor
from roseinfer.cluster.devices import EngineSpec, engine_specs
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import EngineState, GenerateRequest
from roseinfer.engine.remote.keeper import EngineKeeper
from roseinfer.engine.remote.secret import Secret, SecretFile
from tests.helpers.in_loop import PATIENCE_S, run, until
from tests.helpers.remote import LOOPBACK, SECRET, client, keeper, priced_config


def ask(name: str, tokens: int = 12) -> GenerateRequest:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=7, temperature=1.0)
    return GenerateRequest(request_id=name, prompt=Prompt(list(range(5, 45)), params))


async def answer(engine: RoutedEngine, request: GenerateRequest) -> list[int]:
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


def pid(kept: EngineKeeper) -> int:
    """Of the engine's process, the only child of ours that is one."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return next(int(child) for child in children if b"roseinfer.engine.process" in _command(child))


def _command(process: str) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def test_clients_on_other_hosts_are_served_and_see_how_the_engine_does(tmp_path: Path) -> None:
    async def work() -> None:
        async with keeper(priced_config(tmp_path)) as (_, address), client(address) as one, client(address) as other:
            both = await asyncio.gather(answer(one, ask("a")), answer(other, ask("a")))
            assert both[0] == both[1] and len(both[0]) == 12
            board = one._endpoints[0]._reader
            assert isinstance(board, RemoteEngines)
            await until(lambda: board.status(0).state is EngineState.READY)
            assert board.status(0).number == 1
            await until(lambda: (told := board.promise(0)) is not None and told.running == 0 and told.steps >= 12)
            assert one.reports()[0].state is EngineState.READY
            report = board.report(0)
            assert report is not None and report.promise is None, "its times would be those of another clock"

    run(work())


def test_an_engine_that_is_killed_is_started_again_and_found(tmp_path: Path) -> None:
    async def work() -> None:
        async with keeper(priced_config(tmp_path)) as (kept, address), client(address) as engine:
            before = await answer(engine, ask("a"))
            os.kill(pid(kept), signal.SIGKILL)
            await until(lambda: engine.health().alive is False)
            await until(lambda: engine.health().alive)
            assert await answer(engine, ask("b")) == before
            await until(lambda: engine.reports()[0].restarts == 1)
            assert kept.report().restarts == 1 and kept.report().deaths == 1

    run(work())


def test_who_comes_while_the_keeper_looks_for_devices_waits_and_is_told(tmp_path: Path, monkeypatch) -> None:
    """That may take seconds: a process is asked which GPUs there are."""
    looking, found = threading.Event(), threading.Event()

    def specs(*given: Any) -> list[EngineSpec]:
        looking.set()
        assert found.wait(PATIENCE_S)
        return engine_specs(*given)

    monkeypatch.setattr(supervisor, "engine_specs", specs)

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = HostPort(*taken.getsockname())
        kept = EngineKeeper(priced_config(tmp_path), address, SECRET)
        launching = asyncio.create_task(kept.launch())
        await until(looking.is_set)
        engines = RemoteEngines(SECRET, quiet_s=10.0, lost_s=60.0)
        engines.connector(0, address, SECRET)
        await asyncio.sleep(0.1)
        found.set()
        await launching
        await until(lambda: engines.status(0).number == 1)
        assert kept.report().port_stats.refused == 0
        engines.close()
        await kept.close()

    run(work())


def test_another_secret_in_the_file_is_asked_for_of_who_connects_then(tmp_path: Path) -> None:
    """Who is connected stays; server and engine each read it in a file of their own host."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"

    def write(*files: Path, value: bytes) -> None:
        for file in files:
            file.touch(0o600)
            file.write_bytes(value)

    async def work() -> None:
        write(ours, theirs, value=SECRET.value)
        kept = EngineKeeper(priced_config(tmp_path), LOOPBACK, SecretFile(theirs))
        address = await kept.launch()
        await kept.connect()
        async with client(address, secret_file=ours) as engine:
            before = await answer(engine, ask("a"))
            write(theirs, value=b"quite another secret")
            assert await answer(engine, ask("b")) == before
            os.kill(pid(kept), signal.SIGKILL)
            await until(lambda: kept.report().port_stats.refused > 0)
            write(ours, value=b"quite another secret")
            await until(lambda: engine.health().alive)
            assert await answer(engine, ask("c")) == before
        await kept.close()

    run(work())


def test_a_file_without_a_secret_leaves_the_one_before(tmp_path: Path, caplog) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET.value)
    source = SecretFile(path)
    path.write_bytes(b"short")
    assert [source.now(), source.now()] == [SECRET] * 2
    assert [record.message for record in caplog.records if "secret before goes on" in record.message]
    assert len(caplog.records) == 1, "told once"
    path.unlink()
    assert source.now() == SECRET
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_bytes(b"quite another secret")
    other.rename(path)
    assert source.now() == Secret(b"quite another secret")
