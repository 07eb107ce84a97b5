"""The port of an engine under whatever comes: strangers, slow ones, many of them."""

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from roseinfer.cluster.remote.address import HostPort
from roseinfer.core.errors import ConfigError
from roseinfer.engine.remote import gate as module
from roseinfer.engine.remote import tcp
from roseinfer.engine.remote.gate import Gate, Refusals
from roseinfer.engine.remote.handshake import Greeted, HandshakeError, Purpose
from roseinfer.engine.remote.secret import Secret
from tests.helpers.remote import LOOPBACK, SECRET

PATIENCE_S = 30.0


class Scene:
    def __init__(self) -> None:
        self.let_in: list[Greeted] = []
        self.has_room = True
        self.gate = Gate(SECRET, lambda: 1, self._admit)
        self.address = self.gate.open(LOOPBACK)
        self.gate.accept()

    def _admit(self, connection: socket.socket, greeted: Greeted) -> bool:
        if self.has_room:
            self.let_in.append(greeted)
            connection.close()
        return self.has_room

    async def stranger(self, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        for piece in pieces:
            writer.write(piece)
        return reader, writer

    async def friend(self, secret: Secret = SECRET) -> None:
        (await tcp.connect(self.address, secret, Purpose.ENGINE)).socket.close()


def play(act: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    @contextlib.asynccontextmanager
    async def scene() -> AsyncIterator[Scene]:
        made = Scene()
        try:
            yield made
        finally:
            await made.gate.close()

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), scene() as made:
            await act(made)

    asyncio.run(main())


async def refusals(scene: Scene, count: int) -> None:
    while scene.gate.refused < count:
        await asyncio.sleep(0.005)


def test_random_bytes_are_refused_with_one_line_and_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(0)

    async def act(scene: Scene) -> None:
        for _ in range(100):
            size = rng.choice((82, 83, 200, 5000))
            _, writer = await scene.stranger(rng.randbytes(size))
            writer.close()
        await refusals(scene, 100)
        await scene.friend()
        assert len(scene.let_in) == 1
        assert not scene.gate._strangers, "nothing of them is kept"

    with caplog.at_level(logging.INFO):
        play(act)
    assert 1 <= len(caplog.messages) <= 3, "one for each way to be wrong"
    assert caplog.messages[0].startswith("a connection from 127.0.0.1 was refused: ")


def test_a_wrong_secret_is_logged_once_and_not_once_a_try(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        for _ in range(20):
            with pytest.raises(HandshakeError, match="another secret"):
                await scene.friend(Secret(b"not the one that they have"))
        await scene.friend()
        assert scene.gate.refused == 20 and len(scene.let_in) == 1

    play(act)
    assert caplog.messages == ["a connection from 127.0.0.1 was refused: it has another secret"]
    assert "not the one" not in caplog.text and "tests know" not in caplog.text


@pytest.mark.parametrize("said", [b"", b"roseinfe", b"roseinfe\x01\x00" + bytes(20)], ids=["nothing", "a bit", "half"])
def test_who_does_not_finish_its_handshake_in_time_is_hung_up_on(
    said: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 0.05)

    async def act(scene: Scene) -> None:
        reader, writer = await scene.stranger(said)
        await reader.read()  # until it is closed
        writer.close()
        assert scene.gate.refused == 1

    play(act)
    assert caplog.messages == [
        "a connection from 127.0.0.1 was refused: it has not finished its handshake within 0.05 s"
    ]


def test_many_slow_strangers_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 4)

    async def act(scene: Scene) -> None:
        slow = [await scene.stranger(b"rose") for _ in range(12)]
        await refusals(scene, 8)
        await scene.friend()
        assert len(scene.let_in) == 1 and len(scene.gate._strangers) <= 4
        for _, writer in slow:
            writer.close()

    play(act)


def test_of_a_burst_all_are_taken_in_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are there before the gate looks, so that none has said anything when the next one comes."""
    monkeypatch.setattr(module, "MAX_STRANGERS", 4)

    async def act(scene: Scene) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(socket.create_connection(scene.address))
            await refusals(scene, 8)
            assert scene.gate.refused == 8 and len(scene.gate._strangers) == 4

    play(act)


def test_an_engine_that_takes_no_connections_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def act(scene: Scene) -> None:
        scene.has_room = False
        for _ in range(3):
            await scene.friend()
        await refusals(scene, 3)

    play(act)
    assert caplog.messages == ["a connection from 127.0.0.1 was refused: the engine takes no connections just now"]


def test_an_address_that_cannot_be_used_is_told() -> None:
    async def act(scene: Scene) -> None:
        for address, reason in ((scene.address, "in use"), (HostPort("192.0.2.1", 0), "assign")):
            with pytest.raises(ConfigError, match=f"cannot listen on {address.host}.*{reason}"):
                Gate(SECRET, lambda: 1, scene._admit).open(address)

    play(act)


def test_refusals_stay_small_and_are_told_again_after_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    refusals = Refusals(lambda: now_s[0])
    for host in range(2 * module.MAX_TOLD):
        refusals.tell((f"host{host}", "secret"), f"host{host}")
        refusals.tell((f"host{host}", "secret"), f"host{host}")
    assert len(caplog.messages) == module.MAX_TOLD
    now_s[0] = module.TELL_AGAIN_S
    refusals.tell(("host0", "secret"), "again")
    assert caplog.messages[-1] == "again"


def test_a_name_server_that_does_not_answer_holds_up_nobody_else(monkeypatch) -> None:
    """Not who connects to an address, nor the work of this process that takes threads."""
    monkeypatch.setattr(tcp, "CONNECT_S", 0.1)
    asked, answered = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *more: Any, **flags: Any) -> Any:
        if flags.get("flags", 0) & socket.AI_NUMERICHOST or host == LOOPBACK.host:
            return asked(host, *more, **flags)
        answered.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def act(scene: Scene) -> None:
        names = [HostPort(f"host-{number}.invalid", 7000) for number in range(40)]
        lost = await asyncio.gather(
            *(tcp.connect(name, SECRET, Purpose.ENGINE) for name in names), return_exceptions=True
        )
        assert {str(error) for error in lost} == {"no answer within 0.1 s"}
        monkeypatch.setattr(tcp, "CONNECT_S", PATIENCE_S)
        await scene.friend()
        assert await asyncio.to_thread(lambda: "done") == "done"
        answered.set()

    try:
        play(act)
    finally:
        answered.set()
