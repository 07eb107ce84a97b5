"""Frames: messages on a stream, each its length (4 bytes, little endian) and that many bytes.

`FrameReader` cuts what an event loop receives; `read_frame` and `write_all` are for blocking pipes and sockets;
`channel.MessageChannel` is a whole connection with typed messages in an event loop.
"""

from collections.abc import Callable
from typing import IO, Protocol

HEADER_BYTES = 4


class FrameError(ValueError):
    """Data that is no frame of ours: too long, or not from the expected peer."""


class Frames(Protocol):
    """Both directions of a connection."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes, in order. Raises `FrameError`: the connection is unusable then."""
        ...

    def wrap(self, data: bytes) -> bytes:
        """Return the frame of a message. Raises `OverflowError` if the other side would reject it as too long."""
        ...


class FrameReader:
    """Messages from received data, however it was split. `limit`: bytes of a message; None = the sender is trusted."""

    def __init__(self, limit: int | None = None) -> None:
        self._held = bytearray()
        self._wanted = HEADER_BYTES
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes, in order. Raises `FrameError` for one above the limit.

        Incomplete data is parsed again only when enough has come: a large message in small pieces costs only its bytes.
        """
        if self._held:
            self._held += data
            if len(self._held) < self._wanted:
                return []
            data = bytes(self._held)
            self._held.clear()
        frames, start, end = [], 0, len(data)
        self._wanted = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            size = int.from_bytes(data[start:body], "little")
            if self._limit is not None and size > self._limit:
                raise FrameError(f"message of {size} bytes is too long (at most {self._limit})")
            if end - body < size:
                self._wanted = HEADER_BYTES + size
                break
            frames.append(data[body : body + size])
            start = body + size
        self._held += data[start:]
        return frames


class PlainFrames(FrameReader):
    """Frames between processes of one machine."""

    def wrap(self, data: bytes) -> bytes:
        return frame(data)


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER_BYTES, "little") + data


def read_frame(read: Callable[[int], bytes | None]) -> bytes:
    """Block for one message. `read`: an unbuffered pipe's `read` or a socket's `recv`.

    Raises `EOFError` if the other side has gone.
    """
    return read_exactly(read, int.from_bytes(read_exactly(read, HEADER_BYTES), "little"))


def read_exactly(read: Callable[[int], bytes | None], count: int) -> bytes:
    """Block for `count` bytes. Raises `EOFError` if the other side has gone."""
    data = read(count) if count else b""
    if data is not None and len(data) == count:  # the usual case, without a copy
        return data
    parts = bytearray(data or b"")
    while data and len(parts) < count:
        data = read(count - len(parts))
        parts += data or b""
    if len(parts) < count:
        raise EOFError("the other process has closed the connection")
    return bytes(parts)


def write_all(pipe: IO[bytes], data: bytes) -> None:
    """Write all of `data` to an unbuffered pipe, which may take less at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[pipe.write(rest) :]
