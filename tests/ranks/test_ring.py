"""Messages through shared memory: in order, whole, to every reader, of any length."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from roseinfer.ranks.ring import RingClosedError, RingReader, RingWriter

SIZE = 4096


def nothing() -> None:
    """A writer that waits goes on waiting."""


class Ring:
    """A writer and its readers, each with a mapping of its own as another process would have."""

    def __init__(self, readers: int = 1, stuck: Callable[[], None] = nothing, spin_s: float = 0.0) -> None:
        self.writer = RingWriter(readers, stuck, SIZE)
        self.readers = [
            RingReader(os.dup(self.writer.memory), os.dup(self.writer.bells[number]), number, readers, SIZE, spin_s)
            for number in range(readers)
        ]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ring(stack: ExitStack, readers: int = 1, **options: object) -> Ring:
    made = Ring(readers, **options)  # type: ignore[arg-type]
    for reader in made.readers:
        stack.enter_context(reader)
    stack.callback(made.writer.close)
    return made


@pytest.mark.parametrize("spin_s", [0.0, 1e-3])
def test_each_reader_gets_every_message_whole_and_in_order(stack: ExitStack, spin_s: float) -> None:
    """Some are longer than the ring, most wrap around its end, and readers are sometimes asleep, sometimes behind."""
    made, dice = ring(stack, 2, spin_s=spin_s), random.Random(5)
    lengths = [0, 1, SIZE, 3 * SIZE + 7] + [dice.randrange(2 * SIZE) for _ in range(200)]
    messages = [dice.randbytes(length) for length in lengths]
    got: list[list[bytes]] = [[], []]

    def read(number: int) -> None:
        for _ in messages:
            got[number].append(bytes(made.readers[number].read()))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        made.writer.write(message)
    for thread in threads:
        thread.join(60)
    assert got == [messages, messages]


def test_a_sleeping_reader_is_woken(stack: ExitStack) -> None:
    made = ring(stack)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(bytes(made.readers[0].read())))
    thread.start()
    asleep = made.writer._ring.asleep_at(0)
    while not made.writer._ring.words[asleep]:
        pass
    made.writer.write(b"now")
    thread.join(60)
    assert got == [b"now"]


def test_a_writer_without_room_asks_whether_to_go_on(stack: ExitStack) -> None:
    def stuck() -> None:
        raise TimeoutError

    made = ring(stack, stuck=stuck)
    with pytest.raises(TimeoutError):
        made.writer.write(bytes(SIZE + 1))


@pytest.mark.parametrize(("before", "torn"), [(0, False), (SIZE, True)])
def test_who_is_interrupted_while_writing_has_written_nothing_or_says_so(
    stack: ExitStack, before: int, torn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`before`: bytes that went out already, as there was no room for all."""

    def stuck() -> None:
        raise KeyboardInterrupt

    made = ring(stack, stuck=stuck)
    made.writer.write(bytes(SIZE // 2))
    put = made.writer._put

    def interrupted(part: bytes) -> None:
        put(part)
        if len(part) > 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(made.writer, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.writer.write(bytes(100 + before))
    monkeypatch.undo()
    assert made.writer.torn is torn
    assert made.readers[0].read() == bytes(SIZE // 2)
    if not torn:
        made.writer.write(b"next")
        assert made.readers[0].read() == b"next"


def test_the_end_of_the_writer_is_found_behind_its_last_message() -> None:
    made = Ring()
    made.writer.write(b"last")
    made.writer.close()
    with made.readers[0] as reader:
        assert reader.read() == b"last"
        with pytest.raises(RingClosedError):
            reader.read()


def test_a_reader_that_sleeps_has_time_for_other_things(stack: ExitStack) -> None:
    writer = RingWriter(1, nothing, SIZE)
    stack.callback(writer.close)
    did: list[int] = []

    def idle() -> None:
        did.append(1)
        writer.write(b"now")

    with RingReader(os.dup(writer.memory), os.dup(writer.bells[0]), 0, 1, SIZE, 0.0, idle) as reader:
        assert reader.read() == b"now" and did == [1]
