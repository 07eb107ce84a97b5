"""Calls of a runner as bytes, which rank 0 sends to the other ranks.

Ranks that make the same calls in the same order compute the same.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from roseinfer.core.plan import RowResult, StepPlan, TokenMasks


class Call(IntEnum):
    """First byte of a message.

    After `SUBMIT` come a checksum (8 bytes) of the tokens of all collected steps, and the plan. After `MASKED`, a
    `SAMPLE` under masks, come the number of masks, the row of each, the drafts before each, and the words. After `READ`
    come name and path of an adapter, after `FORGET` its digest.
    """

    SUBMIT = 0
    SAMPLE = 1
    MASKED = 2
    COLLECT = 3
    CLOSE = 4
    READ = 5
    FORGET = 6


_BYTES = [bytes([call]) for call in Call]
SAMPLE, COLLECT, CLOSE = _BYTES[Call.SAMPLE], _BYTES[Call.COLLECT], _BYTES[Call.CLOSE]
_NUMBER_BYTES, _CHECKSUM_BYTES = 4, 8


class SampledDigest:
    """Checksum of all tokens that a rank has sampled, step by step."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, rows: Sequence[RowResult]) -> None:
        # Hashes of numbers are the same in every process.
        self._sum = hash((self._sum, *[row[1] for row in rows]))

    def digest(self) -> bytes:
        return self._sum.to_bytes(_CHECKSUM_BYTES, "little", signed=True)


class CallWriter:
    """Encoder of calls. For one thread at a time."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode

    def submit(self, plan: StepPlan, sampled: SampledDigest) -> bytes:
        return b"".join((_BYTES[Call.SUBMIT], sampled.digest(), self._encode(plan)))

    def read(self, name: str, path: str) -> bytes:
        return _BYTES[Call.READ] + self._encode((name, path))

    def forget(self, digest: str) -> bytes:
        return _BYTES[Call.FORGET] + digest.encode()

    def masked(self, masks: TokenMasks) -> bytes:
        count = len(masks.rows)
        numbers = (count, *masks.rows, *(masks.drafts_before or (0,) * count))
        head = b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in numbers)
        return b"".join((_BYTES[Call.MASKED], head, masks.words))


class CallReader:
    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(StepPlan).decode
        self._decode_names = msgspec.msgpack.Decoder(tuple[str, str]).decode

    def submit(self, message: bytearray) -> tuple[bytes, StepPlan]:
        """Return rank 0's checksum and the plan."""
        return bytes(message[1 : 1 + _CHECKSUM_BYTES]), self._decode(memoryview(message)[1 + _CHECKSUM_BYTES :])

    def read(self, message: bytearray) -> tuple[str, str]:
        """Return name and path of an adapter."""
        return self._decode_names(memoryview(message)[1:])

    def forget(self, message: bytearray) -> str:
        """Return the digest of an adapter."""
        return message[1:].decode()

    def masked(self, message: bytearray) -> tuple[tuple[int, ...], tuple[int, ...], memoryview]:
        """Return the rows of masks, the drafts before each, and the bytes of the masks."""
        (count,) = _numbers(message, 1, 1)
        numbers = _numbers(message, 1 + _NUMBER_BYTES, 2 * count)
        words = memoryview(message)[1 + _NUMBER_BYTES * (1 + 2 * count) :]
        return numbers[:count], numbers[count:], words


def _numbers(message: bytearray, at: int, count: int) -> tuple[int, ...]:
    places = range(at, at + _NUMBER_BYTES * count, _NUMBER_BYTES)
    return tuple(int.from_bytes(message[place : place + _NUMBER_BYTES], "little") for place in places)
