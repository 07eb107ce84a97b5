"""What rank 0 tells the other ranks to do: the calls of a runner, as bytes. Ranks that make the same calls in the same
order compute the same.
"""

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from roseinfer.core.plan import RowResult, StepPlan, TokenMasks


class Call(IntEnum):
    """The first byte of a message. What follows: of `SUBMIT` a checksum (8 bytes) of the tokens of all steps that were
    collected so far, and the plan; of `MASKED`, a `SAMPLE` under masks, how many rows are masked, these, and the words
    of their masks.
    """

    SUBMIT = 0
    SAMPLE = 1
    MASKED = 2
    COLLECT = 3
    CLOSE = 4


_BYTES = [bytes([call]) for call in Call]
SAMPLE, COLLECT, CLOSE = _BYTES[Call.SAMPLE], _BYTES[Call.COLLECT], _BYTES[Call.CLOSE]
_INT, _SUM = 4, 8


class Sampled:
    """A checksum of all tokens that a rank has sampled, step by step: the same wherever the same was sampled."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, rows: Sequence[RowResult]) -> None:
        # Hashes of numbers are the same in every process.
        self._sum = hash((self._sum, *[row[1] for row in rows]))

    def digest(self) -> bytes:
        return self._sum.to_bytes(_SUM, "little", signed=True)


class CallWriter:
    """Of one thread at a time."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode

    def submit(self, plan: StepPlan, sampled: Sampled) -> bytes:
        return b"".join((_BYTES[Call.SUBMIT], sampled.digest(), self._encode(plan)))

    def masked(self, masks: TokenMasks) -> bytes:
        numbers = (len(masks.rows), *masks.rows)
        head = b"".join(number.to_bytes(_INT, "little") for number in numbers)
        return b"".join((_BYTES[Call.MASKED], head, masks.words))


class CallReader:
    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(StepPlan).decode

    def submit(self, message: bytearray) -> tuple[bytes, StepPlan]:
        """The checksum that came with the plan, and the plan."""
        return bytes(message[1 : 1 + _SUM]), self._decode(memoryview(message)[1 + _SUM :])

    def masked(self, message: bytearray) -> tuple[tuple[int, ...], memoryview]:
        """The rows, and the bytes of their masks."""
        count, *_ = _numbers(message, 1, 1)
        head = 1 + _INT
        return _numbers(message, head, count), memoryview(message)[head + _INT * count :]


def _numbers(message: bytearray, at: int, count: int) -> tuple[int, ...]:
    places = range(at, at + _INT * count, _INT)
    return tuple(int.from_bytes(message[place : place + _INT], "little") for place in places)
