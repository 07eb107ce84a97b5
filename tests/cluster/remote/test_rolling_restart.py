"""Engines on other hosts are started anew one after the other, and what cannot be is told and left."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cluster.remote import rolling_restart as renewal
from roseinfer.cluster.remote import subscription as follow
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.status import EngineStatus
from roseinfer.engine.api import EngineState
from roseinfer.engine.remote import tcp
from roseinfer.engine.remote.handshake import HandshakeError, Purpose
from roseinfer.engine.remote.secret import Secret
from tests.helpers.in_loop import run, until
from tests.helpers.remote import SECRET, keeper, priced_config


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(renewal, "SETTLE_S", 0.1)
    monkeypatch.setattr(follow, "LONGEST_WAIT_S", 0.05)
    caplog.set_level(logging.INFO, "roseinfer.engine.remote")


@contextlib.asynccontextmanager
async def following(*addresses: HostPort) -> AsyncIterator[RemoteEngines]:
    engines = RemoteEngines(SECRET, quiet_s=10.0, lost_s=60.0)
    for number, address in enumerate(addresses):
        engines.add(number, address)
    try:
        yield engines
    finally:
        engines.close()


def nobody() -> HostPort:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return HostPort(*free.getsockname())


def told(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    ours = [record.getMessage() for record in caplog.records if record.name == "roseinfer.engine.remote"]
    return [message for message in ours if words in message]


def test_one_after_the_other_and_always_one_takes_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        config = priced_config(tmp_path)
        async with (
            keeper(config) as (one, first),
            keeper(config) as (other, second),
            following(first, second) as engines,
        ):
            await until(lambda: all(engines.status(i).state is EngineState.READY for i in (0, 1)))
            rolling = asyncio.create_task(renewal.rolling_restart([first, second], engines, SECRET, lost_s=30.0))
            while not rolling.done():
                assert EngineState.READY in {kept.report().state for kept in (one, other)}
                await asyncio.sleep(0.002)
            await rolling
            assert [kept.report().restarts for kept in (one, other)] == [1, 1]
            assert [engines.status(i) for i in (0, 1)] == [EngineStatus(EngineState.READY, 2)] * 2
            assert one.report().port_stats.refused == 0
        assert told(caplog, "rolling restart: ") == [
            f"rolling restart: the engine at {first}",
            f"rolling restart: the engine at {second}",
            "rolling restart: done",
        ]

    run(work())


def test_an_engine_that_cannot_be_asked_is_left_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        config, gone = priced_config(tmp_path), nobody()
        async with keeper(config) as (one, first), keeper(config) as (other, last):
            async with following(first, gone, last) as engines:
                await until(lambda: all(engines.status(i).state is EngineState.READY for i in (0, 2)))
                await renewal.rolling_restart([first, gone, last], engines, SECRET, lost_s=30.0)
            assert [kept.report().restarts for kept in (one, other)] == [1, 1]
        assert told(caplog, f"the engine at {gone} is left as it is: Connection refused")

    run(work())


def test_nobody_without_the_secret_has_an_engine_started_anew(tmp_path: Path) -> None:
    async def work() -> None:
        async with keeper(priced_config(tmp_path)) as (kept, address):
            with pytest.raises(HandshakeError, match="another secret"):
                await tcp.connect(address, Secret(b"not that one, another"), Purpose.RENEW)
            await asyncio.sleep(0.2)
            report = kept.report()
            assert (report.restarts, report.state, report.port_stats.refused) == (0, EngineState.READY, 1)

    run(work())


def test_asking_twice_starts_it_anew_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with keeper(priced_config(tmp_path)) as (kept, address):
            for _ in range(3):
                (await tcp.connect(address, SECRET, Purpose.RENEW)).socket.close()
            await until(lambda: kept.report().restarts == 1 and kept.report().state is EngineState.READY)
            await until(lambda: len(told(caplog, "wants the engine to be started anew")) == 3)
            await asyncio.sleep(0.2)
            assert kept.report().restarts == 1

    run(work())


def test_an_engine_that_another_server_has_just_renewed_is_not_waited_for_in_vain(tmp_path: Path) -> None:
    """Its keeper waits for it to settle, and starts it anew once more."""

    async def work() -> None:
        async with keeper(priced_config(tmp_path)) as (kept, address), following(address) as engines:
            (await tcp.connect(address, SECRET, Purpose.RENEW)).socket.close()
            await until(lambda: engines.status(0) == EngineStatus(EngineState.READY, 2))
            await renewal.rolling_restart([address], engines, SECRET, lost_s=30.0)
            assert engines.status(0) == EngineStatus(EngineState.READY, 3) and kept.report().restarts == 2

    run(work())


def test_one_that_is_about_to_stop_is_not_started_anew(tmp_path: Path) -> None:
    """It ends what it has, and that would be cut short."""

    async def work() -> None:
        async with keeper(priced_config(tmp_path)) as (kept, address):
            await kept.drain(30.0)
            (await tcp.connect(address, SECRET, Purpose.RENEW)).socket.close()
            await until(lambda: kept.report().port_stats.refused == 1)
            assert (kept.report().restarts, kept.report().state) == (0, EngineState.DRAINING)

    run(work())


class PriorOutput:
    """What is heard of engines, as a test has it."""

    def __init__(self, *statuses: EngineStatus) -> None:
        self.statuses = list(statuses)

    def status(self, number: int) -> EngineStatus:
        return self.statuses[number]

    def report(self, number: int) -> None:
        return None


def test_one_that_is_starting_is_new_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*given: Any) -> bool:
        raise AssertionError("it was asked")

    monkeypatch.setattr(renewal, "_asked", never)

    async def work() -> None:
        said = PriorOutput(EngineStatus(EngineState.STARTING, 3))
        rolling = asyncio.create_task(renewal.rolling_restart([nobody()], said, SECRET, lost_s=30.0))  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        assert not rolling.done()
        said.statuses[0] = EngineStatus(EngineState.READY, 3)
        await rolling

    run(work())


@pytest.mark.parametrize(
    "later", [EngineStatus(EngineState.DEAD, 1, host_lost=True), EngineStatus(EngineState.DEAD, 2, final=True)], ids=str
)
def test_the_others_are_spared_when_one_does_not_come_back(
    later: EngineStatus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a fault that all share would take all of them."""
    asked = []

    async def work() -> None:
        addresses = [nobody(), nobody()]
        said = PriorOutput(EngineStatus(EngineState.READY, 1), EngineStatus(EngineState.READY, 1))

        async def ask(address: HostPort, secret: Any) -> bool:
            asked.append(address)
            said.statuses[0] = later
            return True

        monkeypatch.setattr(renewal, "_asked", ask)
        await renewal.rolling_restart(addresses, said, SECRET, lost_s=0.2)  # type: ignore[arg-type]
        assert asked == addresses[:1]
        assert told(caplog, f"the engine at {addresses[0]} does not come back: the rolling restart ends here")

    run(work())


def test_the_last_that_takes_requests_is_not_restarted_before_another_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def work() -> None:
        said = PriorOutput(EngineStatus(EngineState.READY, 1), EngineStatus(EngineState.DEAD, 1, host_lost=True))

        async def ask(address: HostPort, secret: Any) -> bool:
            asked.append(address)
            return False

        monkeypatch.setattr(renewal, "_asked", ask)
        rolling = asyncio.create_task(renewal.rolling_restart([nobody(), nobody()], said, SECRET, lost_s=30.0))  # type: ignore[arg-type]
        await asyncio.sleep(0.2)
        assert not asked
        said.statuses[1] = EngineStatus(EngineState.READY, 2)
        await rolling
        assert len(asked) == 2

    run(work())


def test_one_whose_keeper_was_lost_meanwhile_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new keeper counts from 1, and knows nothing of what the one before was asked."""
    asked = []

    async def work() -> None:
        said = PriorOutput(EngineStatus(EngineState.READY, 1))

        async def ask(address: HostPort, secret: Any) -> bool:
            asked.append(address)
            said.statuses[0] = EngineStatus(EngineState.DEAD, 1, host_lost=True)
            return True

        monkeypatch.setattr(renewal, "_asked", ask)
        rolling = asyncio.create_task(renewal.rolling_restart([nobody()], said, SECRET, lost_s=30.0))  # type: ignore[arg-type]
        await until(lambda: len(asked) == 1)
        await asyncio.sleep(0.2)
        said.statuses[0] = EngineStatus(EngineState.READY, 1)
        await until(lambda: len(asked) == 2)
        said.statuses[0] = EngineStatus(EngineState.READY, 2)
        await rolling

    run(work())
