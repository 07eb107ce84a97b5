"""Engines on other hosts are restarted one after the other; those that cannot be are skipped and logged."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cluster.remote import subscription
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.connect import connect
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose
from roseinfer.cluster.remote.rolling_restart import Ask, ask_to_restart, rolling_restart
from roseinfer.cluster.status import EngineStatus
from roseinfer.engine.api import EngineState
from tests.helpers.in_loop import run, until
from tests.helpers.remote import engine_server, foreign_tls, own_tls, priced_config


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(subscription, "MAX_RETRY_S", 0.05)
    caplog.set_level(logging.INFO, "roseinfer.cluster.remote")


@contextlib.asynccontextmanager
async def following(*addresses: HostPort) -> AsyncIterator[RemoteEngines]:
    engines = RemoteEngines(own_tls(), quiet_s=10.0, lost_s=60.0)
    for number, address in enumerate(addresses):
        engines.add(number, address)
    try:
        yield engines
    finally:
        engines.close()


def free_address() -> HostPort:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return HostPort(*free.getsockname())


async def restart(addresses: Sequence[HostPort], engines: Any, ask: Ask | None = None, *, lost_s: float) -> None:
    ask = ask or partial(ask_to_restart, own_tls())
    await rolling_restart(addresses, engines, ask, lost_s=lost_s, settle_s=0.1)


def logged(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("roseinfer.cluster.remote")]
    return [message for message in ours if words in message]


def test_engines_restart_one_after_the_other_and_one_always_takes_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        config = priced_config(tmp_path)
        async with (
            engine_server(config) as (one, first),
            engine_server(config) as (other, second),
            following(first, second) as engines,
        ):
            await until(lambda: all(engines.status(i).state is EngineState.READY for i in (0, 1)))
            rolling = asyncio.create_task(restart([first, second], engines, lost_s=30.0))
            while not rolling.done():
                assert EngineState.READY in {kept.report().state for kept in (one, other)}
                await asyncio.sleep(0.002)
            await rolling
            assert [kept.report().restarts for kept in (one, other)] == [1, 1]
            assert [engines.status(i) for i in (0, 1)] == [EngineStatus(EngineState.READY, 2)] * 2
            assert one.report().port_stats.refused == 0
        assert logged(caplog, "rolling restart: ") == [
            f"rolling restart: the engine at {first}",
            f"rolling restart: the engine at {second}",
            "rolling restart: done",
        ]

    run(work())


def test_an_engine_that_cannot_be_asked_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        config, gone = priced_config(tmp_path), free_address()
        async with engine_server(config) as (one, first), engine_server(config) as (other, last):
            async with following(first, gone, last) as engines:
                await until(lambda: all(engines.status(i).state is EngineState.READY for i in (0, 2)))
                await restart([first, gone, last], engines, lost_s=30.0)
            assert [kept.report().restarts for kept in (one, other)] == [1, 1]
        assert logged(caplog, f"the engine at {gone} is not restarted: Connection refused")

    run(work())


def test_a_host_of_another_deployment_cannot_restart_an_engine(tmp_path: Path) -> None:
    async def work() -> None:
        async with engine_server(priced_config(tmp_path)) as (kept, address):
            with pytest.raises(HandshakeError, match="not signed by our CA"):
                await connect(address, foreign_tls(), Purpose.RESTART)
            await asyncio.sleep(0.2)
            report = kept.report()
            assert (report.restarts, report.state, report.port_stats.refused) == (0, EngineState.READY, 1)

    run(work())


def test_several_requests_restart_an_engine_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with engine_server(priced_config(tmp_path)) as (kept, address):
            for _ in range(3):
                (await connect(address, own_tls(), Purpose.RESTART)).socket.close()
            await until(lambda: kept.report().restarts == 1 and kept.report().state is EngineState.READY)
            await until(lambda: len(logged(caplog, "asks for a restart of the engine")) == 3)
            await asyncio.sleep(0.2)
            assert kept.report().restarts == 1

    run(work())


def test_an_engine_that_another_server_has_just_restarted_is_restarted_again(tmp_path: Path) -> None:
    """The server waits until it has settled, and restarts it once more."""

    async def work() -> None:
        async with engine_server(priced_config(tmp_path)) as (kept, address), following(address) as engines:
            (await connect(address, own_tls(), Purpose.RESTART)).socket.close()
            await until(lambda: engines.status(0) == EngineStatus(EngineState.READY, 2))
            await restart([address], engines, lost_s=30.0)
            assert engines.status(0) == EngineStatus(EngineState.READY, 3) and kept.report().restarts == 2

    run(work())


def test_an_engine_that_is_about_to_stop_is_not_restarted(tmp_path: Path) -> None:
    """Requests may finish."""

    async def work() -> None:
        async with engine_server(priced_config(tmp_path)) as (kept, address):
            await kept.drain(30.0)
            (await connect(address, own_tls(), Purpose.RESTART)).socket.close()
            await until(lambda: kept.report().port_stats.refused == 1)
            assert (kept.report().restarts, kept.report().state) == (0, EngineState.DRAINING)

    run(work())


class ScriptedEngines:
    """Statuses of engines, as a test sets them."""

    def __init__(self, *statuses: EngineStatus) -> None:
        self.statuses = list(statuses)

    def status(self, number: int) -> EngineStatus:
        return self.statuses[number]

    def report(self, number: int) -> None:
        return None


def test_an_engine_that_is_starting_is_new_and_not_asked() -> None:
    async def never(address: HostPort) -> bool:
        raise AssertionError("it was asked")

    async def work() -> None:
        engines = ScriptedEngines(EngineStatus(EngineState.STARTING, 3))
        rolling = asyncio.create_task(restart([free_address()], engines, never, lost_s=30.0))
        await asyncio.sleep(0.2)
        assert not rolling.done()
        engines.statuses[0] = EngineStatus(EngineState.READY, 3)
        await rolling

    run(work())


@pytest.mark.parametrize(
    "later", [EngineStatus(EngineState.DEAD, 1, host_lost=True), EngineStatus(EngineState.DEAD, 2, final=True)], ids=str
)
def test_no_further_engine_is_restarted_when_one_does_not_come_back(
    later: EngineStatus, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a fault that all share would end all of them."""
    asked = []

    async def work() -> None:
        addresses = [free_address(), free_address()]
        engines = ScriptedEngines(EngineStatus(EngineState.READY, 1), EngineStatus(EngineState.READY, 1))

        async def ask(address: HostPort) -> bool:
            asked.append(address)
            engines.statuses[0] = later
            return True

        await restart(addresses, engines, ask, lost_s=0.2)
        assert asked == addresses[:1]
        assert logged(caplog, f"the engine at {addresses[0]} did not come up again; the rolling restart ends here")

    run(work())


def test_the_last_engine_that_takes_requests_is_not_restarted() -> None:
    """Wait for another one first."""
    asked = []

    async def work() -> None:
        lost = EngineStatus(EngineState.DEAD, 1, host_lost=True)
        engines = ScriptedEngines(EngineStatus(EngineState.READY, 1), lost)

        async def ask(address: HostPort) -> bool:
            asked.append(address)
            return False

        rolling = asyncio.create_task(restart([free_address(), free_address()], engines, ask, lost_s=30.0))
        await asyncio.sleep(0.2)
        assert not asked
        engines.statuses[1] = EngineStatus(EngineState.READY, 2)
        await rolling
        assert len(asked) == 2

    run(work())


def test_an_engine_whose_server_was_lost_meanwhile_is_asked_again() -> None:
    """A new server counts from 1, and does not know what the previous one was asked."""
    asked = []

    async def work() -> None:
        engines = ScriptedEngines(EngineStatus(EngineState.READY, 1))

        async def ask(address: HostPort) -> bool:
            asked.append(address)
            engines.statuses[0] = EngineStatus(EngineState.DEAD, 1, host_lost=True)
            return True

        rolling = asyncio.create_task(restart([free_address()], engines, ask, lost_s=30.0))
        await until(lambda: len(asked) == 1)
        await asyncio.sleep(0.2)
        engines.statuses[0] = EngineStatus(EngineState.READY, 1)
        await until(lambda: len(asked) == 2)
        engines.statuses[0] = EngineStatus(EngineState.READY, 2)
        await rolling

    run(work())
