"""Messages keep their borders, however the bytes come."""

import random

from roseinfer.processes.frames import FrameReader, frame

MESSAGES = [b"", b"a", b"bc" * 300, b"", b"\x00\x00\x00\x00", b"d" * 70_000]


def test_any_split_gives_the_messages_back() -> None:
    rng = random.Random(0)
    data = b"".join(map(frame, MESSAGES * 3))
    for largest in (1, 3, 7, 100, 65_536, len(data)):
        reader, received, at = FrameReader(), [], 0
        while at < len(data):
            size = rng.randint(1, largest)
            received += reader.feed(data[at : at + size])
            at += size
        assert received == MESSAGES * 3


def test_messages_come_as_soon_as_they_are_complete() -> None:
    reader = FrameReader()
    data = frame(b"one") + frame(b"two")
    assert reader.feed(data[:6]) == []
    assert reader.feed(data[6:9]) == [b"one"]
    assert reader.feed(data[9:]) == [b"two"]
