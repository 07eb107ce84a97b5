"""GrammarConstraint an engine's keeper: a connection to it, and again whenever that is lost."""

import asyncio
from typing import Protocol, cast

import msgspec

from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.messages import KeeperMessage, StatusUpdate
from roseinfer.engine.remote import tcp
from roseinfer.engine.remote.handshake import HandshakeError, Purpose
from roseinfer.engine.remote.sealed import SealedFrames
from roseinfer.engine.remote.secret import SecretSource
from roseinfer.processes.frames import FrameError

# Between attempts to reach a keeper, at first and at most, in seconds.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0


class StatusListener(Protocol):
    def told(self, update: StatusUpdate) -> None: ...

    def refused(self, error: HandshakeError) -> None:
        """By the keeper, or it by us; it is tried again."""
        ...

    def unreachable(self, reason: str) -> None:
        """Called once for each time that it is not there."""
        ...


class Follower:
    def __init__(self, address: HostPort, secret: SecretSource, hearer: StatusListener) -> None:
        self._address = address
        self._secret = secret
        self._hearer = hearer
        self._line: _Line | None = None
        self._missed = False  # and somebody has been told
        self._task = asyncio.get_running_loop().create_task(self._follow())

    @property
    def connected(self) -> bool:
        """Whether there is a connection just now, by which something was heard."""
        line = self._line
        return line is not None and line.heard and not line.lost.is_set()

    async def _follow(self) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            try:
                await self._reach()
                wait_s = FIRST_WAIT_S
            except HandshakeError as error:
                self._hearer.refused(error)
            except OSError as error:
                if not self._missed:
                    self._missed = True
                    self._hearer.unreachable(tcp.reason(error))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _reach(self) -> None:
        """Returns when a connection has ended that was there."""
        connection, greeted, _ = await tcp.connect(self._address, self._secret.now(), Purpose.FOLLOW)
        line = _Line(self._hearer, SealedFrames(greeted.keys))
        try:
            await asyncio.get_running_loop().create_connection(lambda: line, sock=connection)
        except BaseException:
            connection.close()
            raise
        self._line, self._missed = line, False
        await line.lost.wait()

    def cut(self, reason: str) -> None:
        """The connection is of no use: a new one is tried."""
        if self._line is not None and not self._line.lost.is_set():
            self._hearer.unreachable(reason)
            self._line.close()

    def close(self) -> None:
        self._task.cancel()
        if self._line is not None:
            self._line.close()


class _Line(asyncio.Protocol):
    def __init__(self, hearer: StatusListener, frames: SealedFrames) -> None:
        self.lost = asyncio.Event()
        self.heard = False
        self._hearer = hearer
        self._frames = frames
        self._decode = msgspec.msgpack.Decoder(KeeperMessage).decode
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                message = self._decode(body)
                self.heard = True
                self._hearer.told(message)
        except (FrameError, msgspec.MsgspecError):
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
