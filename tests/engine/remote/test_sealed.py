"""Frames that prove who sent them: nothing is put in, left out, repeated or changed on the way."""

import contextlib
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.remote.sealed import TAG_BYTES, Keys, SealedFrames
from roseinfer.processes.frames import HEADER_BYTES, FrameError

THERE, BACK = b"a" * 32, b"b" * 32


def ends(limit: int = 2**20) -> tuple[SealedFrames, SealedFrames]:
    return SealedFrames(Keys(THERE, BACK), limit), SealedFrames(Keys(BACK, THERE), limit)


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_messages_back(messages: list[bytes], seed: int) -> None:
    rng = random.Random(seed)
    one, other = ends()
    data, received = b"".join(map(one.wrap, messages)), []
    while data:
        size = rng.randint(1, len(data))
        received += other.feed(data[:size])
        data = data[size:]
    assert received == messages


def _flipped(frames: list[bytes]) -> list[bytes]:
    rng = random.Random(len(frames[0]))
    place = rng.randrange(HEADER_BYTES, len(frames[0]))
    return [frames[0][:place] + bytes([frames[0][place] ^ 1 << rng.randrange(8)]) + frames[0][place + 1 :], *frames[1:]]


@pytest.mark.parametrize(
    "changed",
    [
        _flipped,
        lambda frames: [frames[0], frames[0]],
        lambda frames: frames[::-1],
        lambda frames: frames[1:],
        lambda frames: [(0).to_bytes(HEADER_BYTES, "little"), *frames],
        lambda frames: [(TAG_BYTES).to_bytes(HEADER_BYTES, "little") + bytes(TAG_BYTES), *frames],
    ],
    ids=["a bit", "repeated", "exchanged", "left out", "empty", "without a key"],
)
def test_whoever_meddles_ends_the_connection(changed: Callable[[list[bytes]], list[bytes]]) -> None:
    one, other = ends()
    frames = [one.wrap(b"first message"), one.wrap(b"second message")]
    with pytest.raises(FrameError):
        other.feed(b"".join(changed(frames)))


def test_what_was_said_in_the_other_direction_is_not_taken_back() -> None:
    one, _ = ends()
    with pytest.raises(FrameError):
        one.feed(one.wrap(b"an echo"))


def test_a_huge_frame_is_refused_by_its_length_alone() -> None:
    one, other = ends(limit=100)
    assert other.feed(one.wrap(b"x" * 100)) == [b"x" * 100]
    with pytest.raises(OverflowError, match="101 bytes"):
        one.wrap(b"x" * 101)
    with pytest.raises(FrameError, match="too long"):
        other.feed((2**32 - 1).to_bytes(HEADER_BYTES, "little"))


@given(st.binary(min_size=1, max_size=2000))
@settings(max_examples=200, deadline=None)
def test_random_bytes_give_no_message(data: bytes) -> None:
    _, other = ends(limit=1000)
    with contextlib.suppress(FrameError):
        assert other.feed(data) == []
