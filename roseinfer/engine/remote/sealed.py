"""Frames between two processes that have shown each other that they know the secret: each carries a proof of that.

A message is followed by a keyed hash of its number and itself (BLAKE2b, RFC 7693, 16 bytes), with a key for each
direction of each connection. So nothing can be put in, left out, repeated or changed on the way without the connection
ending. Nothing is hidden: who can read the network reads prompts and answers.
"""

import hmac
from hashlib import blake2b
from typing import NamedTuple

from roseinfer.processes.frames import FrameError, FrameReader, frame

KEY_BYTES = 32
TAG_BYTES = 16
# Of a message: a prompt of two million tokens with room to spare.
MAX_FRAME_BYTES = 2**26


class Keys(NamedTuple):
    """Of one end of a connection, `KEY_BYTES` each."""

    sending: bytes
    receiving: bytes


class SealedFrames:
    """One end of a connection, see `Frames`. Some 2 us a message, and 1 us for each KiB of it."""

    def __init__(self, keys: Keys, limit: int = MAX_FRAME_BYTES) -> None:
        self._keys = keys
        self._limit = limit
        self._reader = FrameReader(limit + TAG_BYTES)
        self._sent = self._received = 0

    def feed(self, data: bytes) -> list[bytes]:
        return [self._opened(sealed) for sealed in self._reader.feed(data)]

    def _opened(self, sealed: bytes) -> bytes:
        data, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self._keys.receiving, self._received, data)):
            raise FrameError("a message that is not the other side's")
        self._received += 1
        return data

    def wrap(self, data: bytes) -> bytes:
        if len(data) > self._limit:
            raise OverflowError(f"{len(data)} bytes are more than a message may have, {self._limit}")
        tag = _tag(self._keys.sending, self._sent, data)
        self._sent += 1
        return frame(data + tag)


def _tag(key: bytes, number: int, data: bytes) -> bytes:
    return blake2b(number.to_bytes(8, "little") + data, key=key, digest_size=TAG_BYTES).digest()
