"""Ring in shared memory: every reader gets all messages, in order and whole."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from roseinfer.ranks.ring import RingClosedError, RingReader, RingWriter

SIZE = 4096


def keep_waiting() -> None:
    pass


class Ring:
    """A writer and its readers, each with a mapping of its own as another process would have."""

    def __init__(self, readers: int = 1, on_full: Callable[[], None] = keep_waiting, spin_s: float = 0.0) -> None:
        self.writer = RingWriter(readers, on_full, SIZE)
        self.readers = [
            RingReader(
                os.dup(self.writer.memory), os.dup(self.writer.wake_pipes[number]), number, readers, SIZE, spin_s
            )
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
    """Some messages are longer than the ring, most wrap around its end, and readers are asleep or slow at times."""
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
    time.sleep(0.05)  # until it sleeps
    made.writer.write(b"now")
    thread.join(60)
    assert got == [b"now"]


def test_a_writer_without_room_calls_back(stack: ExitStack) -> None:
    def on_full() -> None:
        raise TimeoutError

    made = ring(stack, on_full=on_full)
    with pytest.raises(TimeoutError):
        made.writer.write(bytes(SIZE + 1))


@pytest.mark.parametrize(("published", "torn"), [(0, False), (SIZE, True)])
def test_an_interrupted_write_has_no_effect_or_sets_torn(stack: ExitStack, published: int, torn: bool) -> None:
    """`published`: bytes that readers may have seen before the interruption, as the ring had no room for all."""

    class InterruptedMessage(bytes):
        """A message whose last part cannot be copied, as if Ctrl+C came then."""

        def __getitem__(self, part: Any) -> Any:
            if part.stop >= len(self):
                raise KeyboardInterrupt
            return super().__getitem__(part)

    def on_full() -> None:
        raise KeyboardInterrupt

    made = ring(stack, on_full=on_full)
    made.writer.write(bytes(SIZE // 2))
    with pytest.raises(KeyboardInterrupt):
        made.writer.write(InterruptedMessage(100 + published))
    assert made.writer.torn is torn
    assert made.readers[0].read() == bytes(SIZE // 2)
    if not torn:
        made.writer.write(b"next")
        assert made.readers[0].read() == b"next"


def test_readers_get_the_last_message_and_then_the_end() -> None:
    made = Ring()
    made.writer.write(b"last")
    made.writer.close()
    with made.readers[0] as reader:
        assert reader.read() == b"last"
        with pytest.raises(RingClosedError):
            reader.read()


def test_a_sleeping_reader_calls_back(stack: ExitStack) -> None:
    writer = RingWriter(1, keep_waiting, SIZE)
    stack.callback(writer.close)
    calls: list[int] = []

    def idle() -> None:
        calls.append(1)
        writer.write(b"now")

    with RingReader(os.dup(writer.memory), os.dup(writer.wake_pipes[0]), 0, 1, SIZE, 0.0, idle) as reader:
        assert reader.read() == b"now" and calls == [1]
