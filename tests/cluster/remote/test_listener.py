"""The port of an engine: strangers, slow clients, many of them."""

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from roseinfer.cluster.remote import listener as module
from roseinfer.cluster.remote import tcp
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.connect import connect
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose, VerifiedPeer
from roseinfer.cluster.remote.listener import Listener, RefusalLog
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.core.errors import ConfigError
from tests.helpers.remote import LOOPBACK, foreign_tls, own_tls

TIMEOUT_S = 30.0


class Scene:
    def __init__(self) -> None:
        self.admitted: list[VerifiedPeer] = []
        self.passed_on = 0
        self.has_room = True
        self.listener = self.new_listener()
        self.address = self.listener.open(LOOPBACK)
        self.listener.accept()

    def new_listener(self) -> Listener:
        return Listener(own_tls(), lambda: 1, pass_on=self._pass_on, admit=self._admit)

    def _admit(self, connection: socket.socket, peer: VerifiedPeer) -> bool:
        if self.has_room:
            self.admitted.append(peer)
            connection.close()
        return self.has_room

    def _pass_on(self, connection: socket.socket) -> bool:
        if self.has_room:
            self.passed_on += 1
            connection.close()
        return self.has_room

    async def stranger(self, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        for piece in pieces:
            writer.write(piece)
        return reader, writer

    async def friend(self, tls: TlsFolder | None = None) -> None:
        (await connect(self.address, tls or own_tls(), Purpose.STATUS)).socket.close()


def play(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    @contextlib.asynccontextmanager
    async def scene() -> AsyncIterator[Scene]:
        made = Scene()
        try:
            yield made
        finally:
            await made.listener.close()

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S), scene() as made:
            await act(made)

    asyncio.run(main())


async def refusals(scene: Scene, count: int) -> None:
    while scene.listener.refused < count:
        await asyncio.sleep(0.005)


def test_random_bytes_are_rejected_with_one_line_and_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(0)

    async def act(scene: Scene) -> None:
        for _ in range(100):
            size = rng.choice((82, 83, 200, 5000))
            begin = rng.choice((b"", b"roseinfe\x02"))
            _, writer = await scene.stranger(begin + rng.randbytes(size))
            writer.close()
        await refusals(scene, 100)
        await scene.friend()
        assert len(scene.admitted) == 1
        assert not scene.listener.handshakes, "nothing of them is kept"

    with caplog.at_level(logging.INFO):
        play(act)
    assert 1 <= len(caplog.messages) <= 3, "one for each way to be wrong"
    assert caplog.messages[0].startswith("a connection from 127.0.0.1 was rejected: ")


def test_a_certificate_of_another_ca_is_logged_once_and_not_once_a_try(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        for _ in range(20):
            with pytest.raises(HandshakeError, match="not signed by our CA"):
                await scene.friend(foreign_tls())
        await refusals(scene, 20)
        await scene.friend()
        assert scene.listener.refused == 20 and len(scene.admitted) == 1

    play(act)
    assert caplog.messages == [
        "a connection from 127.0.0.1 was rejected: it does not accept our certificate: another CA signed it"
    ]


def test_a_connection_to_the_engine_is_passed_on_before_tls(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        for _ in range(3):
            _, writer = await scene.stranger(b"roseinfe\x01")
            writer.close()
        while scene.passed_on < 3:
            await asyncio.sleep(0.005)
        assert scene.listener.refused == 0 and not scene.admitted

    play(act)


@pytest.mark.parametrize(
    "said",
    [b"", b"rose", b"roseinfe\x02", b"roseinfe\x02\x16\x03\x01"],
    ids=["nothing", "a bit", "its purpose", "half"],
)
def test_a_client_that_does_not_finish_its_handshake_in_time_is_disconnected(
    said: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def act(scene: Scene) -> None:
        reader, writer = await scene.stranger(said)
        await reader.read()  # until it is closed
        writer.close()
        assert scene.listener.refused == 1

    play(act)
    assert caplog.messages == [
        "a connection from 127.0.0.1 was rejected: it did not finish its handshake within 0.05 s"
    ]


def test_many_slow_strangers_do_not_block_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES_COUNT", 4)

    async def act(scene: Scene) -> None:
        slow = [await scene.stranger(b"rose") for _ in range(12)]
        await refusals(scene, 8)
        await scene.friend()
        assert len(scene.admitted) == 1 and scene.listener.handshakes <= 4
        for _, writer in slow:
            writer.close()

    play(act)


def test_all_connections_of_a_burst_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections exist before the listener accepts the first, and none has sent anything."""
    monkeypatch.setattr(module, "MAX_HANDSHAKES_COUNT", 4)

    async def act(scene: Scene) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(socket.create_connection(scene.address))
            await refusals(scene, 8)
            assert scene.listener.refused == 8 and scene.listener.handshakes == 4

    play(act)


def test_an_engine_that_accepts_no_connections_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        scene.has_room = False
        for _ in range(3):
            await scene.friend()
        await refusals(scene, 3)

    play(act)
    assert caplog.messages == [
        "a connection from 127.0.0.1 was rejected: the engine accepts no connections at the moment"
    ]


def test_an_address_that_cannot_be_used_is_named() -> None:
    async def act(scene: Scene) -> None:
        for address, reason in ((scene.address, "in use"), (HostPort("192.0.2.1", 0), "assign")):
            with pytest.raises(ConfigError, match=f"cannot listen on {address.host}.*{reason}"):
                scene.new_listener().open(address)

    play(act)


def test_the_log_of_rejections_is_bounded_and_repeats_after_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    log = RefusalLog(lambda: now_s[0])
    for host in range(2 * module.MAX_LOGGED_COUNT):
        log.warn((f"host{host}", "secret"), f"host{host}")
        log.warn((f"host{host}", "secret"), f"host{host}")
    assert len(caplog.messages) == module.MAX_LOGGED_COUNT
    now_s[0] = module.REPEAT_LOG_S
    log.warn(("host0", "secret"), "again")
    assert caplog.messages[-1] == "again"


def test_a_name_server_that_does_not_answer_delays_no_other_work(monkeypatch) -> None:
    """Neither connections to addresses nor other work in threads."""
    monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", 0.1)
    asked, answered = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *more: Any, **flags: Any) -> Any:
        if flags.get("flags", 0) & socket.AI_NUMERICHOST or host == LOOPBACK.host:
            return asked(host, *more, **flags)
        answered.wait(TIMEOUT_S)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def act(scene: Scene) -> None:
        names = [HostPort(f"host-{number}.invalid", 7000) for number in range(40)]
        lost = await asyncio.gather(
            *(connect(name, own_tls(), Purpose.ENGINE) for name in names), return_exceptions=True
        )
        assert {str(error) for error in lost} == {"no answer within 0.1 s"}
        monkeypatch.setattr(tcp, "CONNECT_TIMEOUT_S", TIMEOUT_S)
        await scene.friend()
        assert await asyncio.to_thread(lambda: "done") == "done"
        answered.set()

    try:
        play(act)
    finally:
        answered.set()
