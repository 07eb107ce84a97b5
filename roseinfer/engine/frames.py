"""Messages on a stream socket: each is its length (4 bytes, little endian) and that many bytes."""

from typing import Protocol

HEADER_BYTES = 4


class FrameError(ValueError):
    """What has come is no message of ours: too long, or not from whom it must be."""


class Frames(Protocol):
    """Both directions of a connection: messages in, out of what comes; a message out, as what is to be sent."""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order. Raises `FrameError`; then the connection is of no more use."""
        ...

    def wrap(self, data: bytes) -> bytes:
        """Raises `OverflowError` if the other side would not take a message so long."""
        ...


class FrameReader:
    """Cuts what a socket delivers into messages, however the bytes were split on the way. `limit`: of a message, in
    bytes; None: whoever sends is trusted.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._held = bytearray()
        self._wanted = HEADER_BYTES
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order. Raises `FrameError` at one that is longer than the limit.

        What is held back is looked at again only when enough of it is there: a message of many megabytes that comes
        in small pieces costs no more than its bytes.
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
                raise FrameError(f"a message of {size} bytes, more than {self._limit}")
            if end - body < size:
                self._wanted = HEADER_BYTES + size
                break
            frames.append(data[body : body + size])
            start = body + size
        self._held += data[start:]
        return frames


class PlainFrames(FrameReader):
    """Between processes of one machine."""

    def wrap(self, data: bytes) -> bytes:
        return frame(data)


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER_BYTES, "little") + data
