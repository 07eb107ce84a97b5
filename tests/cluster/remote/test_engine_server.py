"""A real engine and its server: clients are served, the engine is killed, restarted, drained and stopped."""

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cluster import supervisor
from roseinfer.cluster.devices import EngineSpec, engine_specs
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.connect import connect
from roseinfer.cluster.remote.engine_server import EngineServer
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import EngineState, GenerateRequest
from tests.helpers.in_loop import PATIENCE_S, run, until
from tests.helpers.remote import client, engine_server, foreign_tls, own_tls, priced_config, write_certificate


def ask(name: str, tokens: int = 12) -> GenerateRequest:
    params = SequenceParams(max_tokens=tokens, ignore_eos=True, seed=7, temperature=1.0)
    return GenerateRequest(request_id=name, prompt=Prompt(list(range(5, 45)), params))


async def answer(engine: RoutedEngine, request: GenerateRequest) -> list[int]:
    return [token async for chunk in engine.generate(request) for token in chunk.token_ids]


def engine_pid() -> int:
    """Return the process of the engine, our only child of that name."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return next(int(child) for child in children if b"remote.engine_process" in _command(child))


def _command(process: str) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def test_clients_on_other_hosts_are_served_and_see_the_status(tmp_path: Path) -> None:
    async def work() -> None:
        async with (
            engine_server(priced_config(tmp_path)) as (_, address),
            client(address) as one,
            client(address) as other,
        ):
            both = await asyncio.gather(answer(one, ask("a")), answer(other, ask("a")))
            assert both[0] == both[1] and len(both[0]) == 12
            board = one.endpoints[0].reader
            assert isinstance(board, RemoteEngines)
            await until(lambda: board.status(0).state is EngineState.READY)
            assert board.status(0).number == 1
            await until(lambda: (told := board.promise(0)) is not None and told.running == 0 and told.steps >= 12)
            assert one.reports()[0].state is EngineState.READY
            report = board.report(0)
            assert report is not None and report.promise is None, "its times would be those of another clock"

    run(work())


def test_an_engine_that_is_killed_is_restarted_and_found(tmp_path: Path) -> None:
    async def work() -> None:
        async with engine_server(priced_config(tmp_path)) as (server, address), client(address) as engine:
            before = await answer(engine, ask("a"))
            os.kill(engine_pid(), signal.SIGKILL)
            await until(lambda: engine.health().alive is False)
            await until(lambda: engine.health().alive)
            assert await answer(engine, ask("b")) == before
            await until(lambda: engine.reports()[0].restarts == 1)
            assert server.report().restarts == 1 and server.report().deaths == 1

    run(work())


def test_clients_wait_while_the_server_looks_for_devices(tmp_path: Path, monkeypatch) -> None:
    """Listing the GPUs takes a process of its own, and seconds."""
    looking, found = threading.Event(), threading.Event()

    def specs(*given: Any) -> list[EngineSpec]:
        looking.set()
        assert found.wait(PATIENCE_S)
        return engine_specs(*given)

    monkeypatch.setattr(supervisor, "engine_specs", specs)

    async def work() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = HostPort(*taken.getsockname())
        server = EngineServer(priced_config(tmp_path), address, own_tls())
        launching = asyncio.create_task(server.launch())
        await until(looking.is_set)
        engines = RemoteEngines(own_tls(), quiet_s=10.0, lost_s=60.0)
        engines.connector(0, address)
        await asyncio.sleep(0.1)
        found.set()
        await launching
        await until(lambda: engines.status(0).number == 1)
        assert server.report().port_stats.refused == 0
        engines.close()
        await server.close()

    run(work())


def test_another_ca_is_used_for_new_connections_without_a_restart(tmp_path: Path) -> None:
    """Existing connections continue. While only one host has the new files, new connections are rejected."""
    ours, theirs = write_certificate(tmp_path / "ours"), write_certificate(tmp_path / "theirs")

    async def work() -> None:
        async with (
            engine_server(priced_config(tmp_path), tls=TlsFolder(theirs)) as (server, address),
            client(address, tls=TlsFolder(ours)) as engine,
        ):
            before = await answer(engine, ask("a"))
            write_certificate(theirs, "new")
            assert await answer(engine, ask("b")) == before
            os.kill(engine_pid(), signal.SIGKILL)
            await until(lambda: server.report().port_stats.refused > 0)
            write_certificate(ours, "new")
            await until(lambda: engine.health().alive)
            assert await answer(engine, ask("c")) == before

    run(work())


def test_rejections_of_the_engines_process_are_counted_and_logged_by_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with engine_server(priced_config(tmp_path)) as (server, address):
            for _ in range(3):
                with pytest.raises(HandshakeError):
                    await connect(address, foreign_tls(), Purpose.ENGINE)
                with pytest.raises(HandshakeError):
                    await connect(address, own_tls(), Purpose.ENGINE, "engine-of-another-name")
            await until(lambda: server.report().port_stats.refused == 6)
            async with client(address) as engine:
                assert len(await answer(engine, ask("a"))) == 12

    run(work())
    rejected = [message for message in caplog.messages if "rejected" in message]
    assert rejected == [
        "a connection from 127.0.0.1 was rejected: it does not accept our certificate: another CA signed it"
    ]
