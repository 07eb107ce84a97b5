"""Messages on a stream socket: each is its length (4 bytes, little endian) and that many bytes."""

HEADER_BYTES = 4


class FrameReader:
    """Cuts what a socket delivers into messages, however the bytes were split on the way."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._wanted = HEADER_BYTES

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, in order.

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
            if end - body < size:
                self._wanted = HEADER_BYTES + size
                break
            frames.append(data[body : body + size])
            start = body + size
        self._held += data[start:]
        return frames


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(HEADER_BYTES, "little") + data
