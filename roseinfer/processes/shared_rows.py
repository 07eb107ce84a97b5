"""Shared memory rows: numbers that one process writes and others read, without any waiting.

A `RowLayout` says what a row holds: `words`, 64-bit integers that are read and written one by one, and optionally a
`record`, a NamedTuple of numbers that is read whole::

    class Count(IntEnum):
        REQUESTS = 0
        BEATS = 1

    COUNTERS = RowLayout(words=len(Count))
    rows = SharedRows.create(folder / "counters", COUNTERS, workers)     # the parent
    rows = SharedRows.open(folder / "counters", COUNTERS)                # a child
    rows.add(index, Count.BEATS, 1)
    rows.total(Count.REQUESTS)

    PROMISES = RowLayout(record=Promise(0.0))
    rows.write(engine, promise)
    rows.read(engine)                                                    # the newest promise, or None

One process writes a word or a record at a time; its successor continues where it finds them. Who creates the file
removes it (`private_folder` does, however its owner ends).
"""

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

from roseinfer.core.errors import ResourceError

Record = TypeVar("Record", bound=tuple[Any, ...])

_CODES = {float: "d", int: "q", bool: "?"}
_WORD_BYTES = 8
_LINE_BYTES = 64  # rows and slots begin at a cache line of their own
_MAX_READ_TRIES = 8
_HEADER = struct.Struct("<16sq")  # version and number of rows
_FORMAT = "roserow1"
_CHECKSUM = struct.Struct("<I")
_WRITE_COUNT = 0  # word of a row: how often its record has been written


class RowLayout(NamedTuple, Generic[Record]):
    """`words`: number of integers. `record`: an example, whose fields are numbers, or tuples (also named ones) of
    numbers; None: none.

    `tag`: further text that distinguishes this layout, such as the names of states that a word encodes.
    """

    words: int = 0
    record: Record | None = None
    tag: str = ""

    @property
    def slot(self) -> struct.Struct:
        """Return the format of a record: how often one was written, whether there is one, its numbers."""
        codes = []
        for value in self.record or ():
            numbers = value if isinstance(value, tuple) else (value,)
            codes += [_CODES[type(number)] for number in numbers]
        return struct.Struct(f"<q?{''.join(codes)}")

    @property
    def version(self) -> bytes:
        """Return what distinguishes this layout from others, and from that of another release."""
        fields = getattr(self.record, "_fields", ())
        checksum = zlib.crc32(f"{self.words} {self.slot.format} {fields} {self.tag}".encode())
        return f"{_FORMAT}{checksum:08x}".encode()


class SharedRows(Generic[Record]):
    """Rows in a memory-mapped file.

    A record is written to the older of two slots, with a checksum, and then becomes the newest by one aligned word. So
    a reader finds a whole record also while the next one is written, or after the writer was killed in the middle. The
    checksum is for machines that reorder writes, and for two writers of one record. A write and a read take 6 us each.
    """

    def __init__(self, descriptor: int, layout: RowLayout[Record], rows: int) -> None:
        """Map a file of that layout, which an inherited `descriptor` stands for. The descriptor is not needed later."""
        self.rows = rows
        self._layout = layout
        self._memory = mmap.mmap(descriptor, _size(layout, rows))
        self._words = memoryview(self._memory).cast("q")
        self._struct = layout.slot
        self._slot_bytes = self._struct.size + _CHECKSUM.size
        self._slot_room = _lines(self._slot_bytes)
        self._first_slot = _word_room(layout)
        row_bytes = _row_bytes(layout)
        # Row -> its first byte. A dict and not arithmetic: a row that is none raises KeyError.
        self._start = {row: _LINE_BYTES + row * row_bytes for row in range(rows)}
        self._first_word = {row: start // _WORD_BYTES + 1 for row, start in self._start.items()}
        self._stride = row_bytes // _WORD_BYTES
        record = layout.record or ()
        self._tuples = [(i, value) for i, value in enumerate(record) if isinstance(value, tuple)]

    @classmethod
    def create(cls, path: Path, layout: RowLayout[Record], rows: int) -> Self:
        """Make a file of empty rows: all words are 0, there is no record. Raises `ResourceError`."""
        blank = _HEADER.pack(layout.version, rows).ljust(_size(layout, rows), b"\0")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Written and not only extended: touching a page for which there is no room would kill the process.
                while blank:
                    blank = blank[os.write(descriptor, blank) :]
                return cls(descriptor, layout, rows)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ResourceError(
                f"cannot create {str(path)!r} ({error.strerror}); set TMPDIR to another path"
            ) from error

    @classmethod
    def open(cls, path: Path, layout: RowLayout[Record]) -> Self:
        """Open another process's rows. Raises `ResourceError` if there are none, or they have another layout."""
        try:
            descriptor = os.open(path, os.O_RDWR)
            try:
                header = os.pread(descriptor, _HEADER.size, 0)
                version, rows = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
                if version == layout.version and os.fstat(descriptor).st_size == _size(layout, rows):
                    return cls(descriptor, layout, rows)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ResourceError(f"cannot read shared memory {str(path)!r}: {error.strerror}") from error
        raise ResourceError(f"shared memory {str(path)!r} is of another version of roseinfer; restart the server")

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    # --- words --------------------------------------------------------------------------------------------------
    def get(self, row: int, word: int) -> int:
        return self._words[self._first_word[row] + word]

    def set(self, row: int, word: int, value: int) -> None:
        self._words[self._first_word[row] + word] = value

    def add(self, row: int, word: int, amount: int) -> None:
        self._words[self._first_word[row] + word] += amount

    def total(self, word: int) -> int:
        """Return the sum of a word over all rows."""
        return sum(self._words[self._first_word[0] + word :: self._stride])

    def clear(self, row: int) -> None:
        """Set all words of a row to 0."""
        for word in range(self._layout.words):
            self.set(row, word, 0)

    # --- records ------------------------------------------------------------------------------------------------
    def write(self, row: int, record: Record | None) -> None:
        """Write the record of a row. None: there is none until the next one."""
        start = self._start[row]
        written = self._words[start // _WORD_BYTES + _WRITE_COUNT] + 1
        numbers = self._numbers(record or self._layout.record or ())
        data = self._struct.pack(written, record is not None, *numbers)
        slot = self._slot(start, written)
        self._memory[slot : slot + self._slot_bytes] = data + _CHECKSUM.pack(zlib.crc32(data))
        self._words[start // _WORD_BYTES + _WRITE_COUNT] = written

    def read(self, row: int) -> Record | None:
        """Return the newest record; None if there is none."""
        start = self._start[row]
        for _ in range(_MAX_READ_TRIES):
            written = self._words[start // _WORD_BYTES + _WRITE_COUNT]
            if not written:
                return None
            slot = self._slot(start, written)
            data = self._memory[slot : slot + self._slot_bytes]
            if zlib.crc32(data[: self._struct.size]) != _CHECKSUM.unpack_from(data, self._struct.size)[0]:
                continue
            number, there, *values = self._struct.unpack_from(data)
            if number == written:
                return self._record(values) if there else None
        return None

    def written(self, row: int) -> int:
        """Return how often the record has been written: a heartbeat of a process that writes one at each step."""
        return self._words[self._start[row] // _WORD_BYTES + _WRITE_COUNT]

    def _slot(self, start: int, written: int) -> int:
        return start + self._first_slot + written % 2 * self._slot_room

    def _numbers(self, fields: tuple[Any, ...]) -> list[float]:
        numbers: list[float] = []
        start = 0
        for place, _ in self._tuples:
            numbers += fields[start:place]
            numbers += fields[place]
            start = place + 1
        numbers += fields[start:]
        return numbers

    def _record(self, numbers: list[Any]) -> Record:
        for place, example in self._tuples:
            end = place + len(example)
            numbers[place:end] = [getattr(example, "_make", tuple)(numbers[place:end])]
        make: Callable[[list[Any]], Record] = self._layout.record._make  # type: ignore[union-attr]
        return make(numbers)


def _lines(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def _word_room(layout: RowLayout[Any]) -> int:
    return _lines((1 + layout.words) * _WORD_BYTES)


def _row_bytes(layout: RowLayout[Any]) -> int:
    slots = 0 if layout.record is None else 2 * _lines(layout.slot.size + _CHECKSUM.size)
    return _word_room(layout) + slots


def _size(layout: RowLayout[Any], rows: int) -> int:
    return _LINE_BYTES + rows * _row_bytes(layout)
