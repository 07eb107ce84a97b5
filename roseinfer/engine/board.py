"""The board: memory that the engines of a server write their promises to, and that every process of it reads."""

import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roseinfer.cluster.status import EngineStatus
from roseinfer.core.errors import ResourceError
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineState

_STATES = tuple(EngineState)


_CODES = {float: "d", int: "q", bool: "?"}
_WORD = 8
_LINE = 64  # rows and slots begin at a cache line of their own
_TRIES = 8


def _fields(promise: Promise) -> str:
    """How a promise is laid out: in the order of its fields, as many numbers of each as its default has."""
    codes = []
    for value in promise:
        many: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
        codes += [_CODES[type(number)] for number in many]
    return "".join(codes)


_BLANK = Promise(0.0)
# Written how often, is there a promise at all, the promise.
_SLOT = struct.Struct(f"<q?{_fields(_BLANK)}")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = _SLOT.size + _CHECKSUM.size
_TUPLES = [(i, len(value)) for i, value in enumerate(_BLANK) if isinstance(value, tuple)]
# Magic and version, engines.
_HEADER = struct.Struct("<16sq")
_VERSION = f"rosebd1 {zlib.crc32(f'{_SLOT.format} {Promise._fields} {_STATES}'.encode()):08x}".encode()


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


_SLOT_ROOM = _lines(_SLOT_BYTES)
_ROW = _LINE + 2 * _SLOT_ROOM  # the words of a row, its two slots


class Board:
    """A row for each engine: its promise, written by the engine, and its standing, written by its owner.

    Nobody waits for anybody. A promise is written to the one of two slots that is not the newest, with a checksum, and
    then becomes the newest by one aligned word, the number of times that the row has been written. So who reads finds
    a whole promise also while the next one is being written, or after its writer was stopped or killed in the middle
    of that. The checksum is for machines that reorder writes, and for a row that two write at a time.

    One process writes the promises of a row at a time; the next one goes on where it finds the row. A write and a read
    take some 4 us each.
    """

    def __init__(self, memory: mmap.mmap, engines: int) -> None:
        self.engines = engines
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        # Engine -> the first of the two words of its row.
        self._word = {engine: (_LINE + engine * _ROW) // _WORD for engine in range(engines)}
        self._newest = [(0, EngineStatus())] * engines  # words, and what they say

    @classmethod
    def create(cls, path: Path, engines: int) -> "Board":
        """A new file of empty rows. Raises `ResourceError` if there is no room for it."""
        size = _LINE + engines * _ROW
        blank = _HEADER.pack(_VERSION, engines).ljust(size, b"\0")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Written and not only made long: a page for which there is no room would end who touches it.
                while blank:
                    blank = blank[os.write(descriptor, blank) :]
                return cls(mmap.mmap(descriptor, size), engines)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ResourceError(f"cannot make the file {path} ({error.strerror}): set TMPDIR elsewhere") from error

    @classmethod
    def open(cls, path: Path) -> "Board":
        """Somebody else's. Raises `ResourceError` if there is none, or one of another version of roseinfer."""
        try:
            descriptor = os.open(path, os.O_RDWR)
            try:
                memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise ResourceError(f"cannot read the server's shared memory {path}: {error}") from error
        version, engines = _HEADER.unpack(memory[: _HEADER.size]) if len(memory) >= _LINE else (b"", 0)
        if version.rstrip(b"\0") != _VERSION or len(memory) != _LINE + engines * _ROW:
            memory.close()
            raise ResourceError(f"the server's shared memory {path} is another version's: restart the server")
        return cls(memory, engines)

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    # --- promises -----------------------------------------------------------------------------------------------
    def publish(self, engine: int, promise: Promise) -> None:
        """From the engine alone, at each step."""
        self._write(engine, True, promise)

    def clear(self, engine: int) -> None:
        """There is no promise until the next one. From the owner, once the engine's process has ended."""
        self._write(engine, False, _BLANK)

    def promise(self, engine: int) -> Promise | None:
        """The newest promise; None: there is none."""
        for _ in range(_TRIES):
            written = self._words[self._word[engine]]
            if not written:
                return None
            start = self._slot(engine, written)
            data = self._memory[start : start + _SLOT_BYTES]
            if zlib.crc32(data[: _SLOT.size]) != _CHECKSUM.unpack_from(data, _SLOT.size)[0]:
                continue
            number, there, *values = _SLOT.unpack_from(data)
            if number == written:
                return _promise(values) if there else None
        return None

    def write_count(self, engine: int) -> int:
        """How often the row has been written: it moves as long as the engine makes steps."""
        return self._words[self._word[engine]]

    def _write(self, engine: int, there: bool, promise: Promise) -> None:
        word = self._word[engine]
        number = self._words[word] + 1
        data = _SLOT.pack(number, there, *_numbers(promise))
        start = self._slot(engine, number)
        self._memory[start : start + _SLOT_BYTES] = data + _CHECKSUM.pack(zlib.crc32(data))
        self._words[word] = number

    # --- standings ----------------------------------------------------------------------------------------------
    def set_status(self, engine: int, standing: EngineStatus) -> None:
        """From the owner."""
        word = 2 * (standing.number * len(_STATES) + _STATES.index(standing.state)) + standing.final
        self._words[self._word[engine] + 1] = word

    def status(self, engine: int) -> EngineStatus:
        word = self._words[self._word[engine] + 1]
        seen, standing = self._newest[engine]
        if word != seen:
            number, state = divmod(word // 2, len(_STATES))
            standing = EngineStatus(_STATES[state], number, bool(word % 2))
            self._newest[engine] = (word, standing)
        return standing

    @staticmethod
    def _slot(engine: int, number: int) -> int:
        return _LINE + engine * _ROW + _LINE + number % 2 * _SLOT_ROOM


def _numbers(promise: Promise) -> Iterable[float]:
    fields: tuple[Any, ...] = promise
    numbers: list[float] = []
    start = 0
    for place, _ in _TUPLES:
        numbers += fields[start:place]
        numbers += fields[place]
        start = place + 1
    numbers += fields[start:]
    return numbers


def _promise(numbers: list[Any]) -> Promise:
    for place, length in _TUPLES:
        numbers[place : place + length] = [tuple(numbers[place : place + length])]
    return Promise._make(numbers)
