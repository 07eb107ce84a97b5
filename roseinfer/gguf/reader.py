"""Reader of a GGUF file's metadata and of its tensors' positions. The file is mapped; no tensor is read.

Every count, length and offset is checked before use. A truncated, damaged or hostile file costs an error message and no
memory. `gguf.GGUFReader` is not used, since it trusts the file: a list that claims 2^60 bytes in a file of 49 takes
gigabytes without end. It also needs 3 s for SmolLM2's vocabulary, where this reader needs 0.06 s.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf import layout
from roseinfer.gguf.layout import Encoding, ValueKind

_U32, _U64 = layout.NUMBERS[ValueKind.UINT32], layout.NUMBERS[ValueKind.UINT64]


@dataclass(frozen=True, slots=True)
class ArrayValue:
    """List in the metadata that has not been read: `count` values of one kind from byte `start`."""

    kind: int
    count: int
    start: int


Value = int | float | bool | str | ArrayValue


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Position of a tensor: `nbytes` from byte `start` of `path`. `shape` has the contiguous dimension last."""

    path: Path
    shape: tuple[int, ...]
    encoding: Encoding
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a file. Lists of the metadata stay in the file until they are requested."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]

    def strings(self, key: str) -> list[str]:
        """Return a list of strings; empty if missing. Raise `UnsupportedModelError` for another kind of value."""
        found = self._array(key)
        if found is None:
            return []
        with _mapped(self.path) as data:
            cursor = _Cursor(data, self.path, found.start)
            if found.kind != ValueKind.STRING:
                cursor.refuse(f"{key} is not a list of strings")
            return [cursor.text(layout.MAX_TEXT_BYTES) for _ in range(found.count)]

    def numbers(self, key: str) -> list[int | float]:
        """Return a list of numbers; empty if missing. Raise `UnsupportedModelError` for another kind of value."""
        found = self._array(key)
        if found is None:
            return []
        with _mapped(self.path) as data:
            cursor = _Cursor(data, self.path, found.start)
            if found.kind not in layout.NUMBERS:
                cursor.refuse(f"{key} is not a list of numbers")
            return cursor.numbers(found.kind, found.count)

    def _array(self, key: str) -> ArrayValue | None:
        found = self.metadata.get(key)
        if found is not None and not isinstance(found, ArrayValue):
            raise UnsupportedModelError(f"{self.path}: {key} = {found!r} is not a list")
        return found


def read_file(path: Path) -> GgufFile:
    """Read one file, which may be a part of a model. Raise `UnsupportedModelError` if it is damaged or not GGUF."""
    with _mapped(path) as data:
        cursor = _Cursor(data, path)
        _check_version(cursor, data)
        tensors = cursor.count(layout.MAX_TENSORS, "tensors")
        keys = cursor.count(layout.MAX_KEYS, "metadata keys")
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = cursor.text(layout.MAX_NAME_BYTES)
            if key in metadata:
                cursor.refuse(f"the metadata contains {printable(key)} twice")
            metadata[key] = cursor.value()
        return GgufFile(path, metadata, _tensors(cursor, tensors, metadata))


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # the file is empty
        raise UnsupportedModelError(f"{path}: this is not a GGUF file: it is empty") from error


def _check_version(cursor: "_Cursor", data: mmap.mmap) -> None:
    if data[: len(layout.MAGIC)] != layout.MAGIC:
        cursor.refuse("this is not a GGUF file")
    cursor.skip(len(layout.MAGIC))
    version = cursor.unsigned32()
    if version in layout.SWAPPED_VERSIONS:
        cursor.refuse("the file is big-endian, which is not supported")
    if version not in layout.VERSIONS:
        known = ", ".join(map(str, layout.VERSIONS))
        cursor.refuse(f"version {version} of GGUF is not supported; known: {known}")


def _tensors(cursor: "_Cursor", count: int, metadata: dict[str, Value]) -> dict[str, TensorInfo]:
    """Read the table of tensors. Data begins at the first multiple of the alignment after it."""
    alignment = metadata.get("general.alignment", layout.DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= layout.MAX_TEXT_BYTES or alignment & (alignment - 1):
        cursor.refuse(f"general.alignment = {alignment!r} is not a power of two")
    listed: list[tuple[str, tuple[int, ...], Encoding, int]] = []
    for _ in range(count):
        listed.append(_tensor(cursor, alignment))
    base = -(-cursor.at // alignment) * alignment
    found: dict[str, TensorInfo] = {}
    for name, shape, encoding, offset in listed:
        nbytes = prod(shape) // encoding.block * encoding.size
        if base + offset + nbytes > cursor.size:
            cursor.refuse(
                f"tensor {printable(name)} ends after the {cursor.size} bytes that are there: the file is truncated"
            )
        if name in found:
            cursor.refuse(f"the file contains tensor {printable(name)} twice")
        found[name] = TensorInfo(cursor.path, shape, encoding, base + offset, nbytes)
    return found


def _tensor(cursor: "_Cursor", alignment: int) -> tuple[str, tuple[int, ...], Encoding, int]:
    """Read a tensor's name, shape, encoding, and offset from the beginning of the data."""
    name = cursor.text(layout.MAX_NAME_BYTES)
    dimensions = cursor.unsigned32()
    if not 0 < dimensions <= layout.MAX_DIMENSIONS:
        cursor.refuse(f"tensor {printable(name)} has {dimensions} dimensions")
    shape = tuple(cursor.unsigned64() for _ in range(dimensions))[::-1]
    code, offset = cursor.unsigned32(), cursor.unsigned64()
    encoding = layout.ENCODINGS.get(code)
    if encoding is None:
        called = layout.OTHER_ENCODINGS.get(code, f"number {code}")
        known = ", ".join(each.name for each in layout.ENCODINGS.values())
        cursor.refuse(f"tensor {printable(name)} has type {called}, which is not supported; known: {known}")
    if 0 in shape or shape[-1] % encoding.block:
        cursor.refuse(f"tensor {printable(name)} is {list(shape)}, but {encoding.name} has blocks of {encoding.block}")
    if offset % alignment:
        cursor.refuse(f"tensor {printable(name)} begins at {offset}, which is not a multiple of {alignment}")
    return name, shape, encoding, offset


class _Cursor:
    """Position in a mapped file that advances as it is read. Raises `UnsupportedModelError` at the file's end."""

    def __init__(self, data: mmap.mmap, path: Path, at: int = 0) -> None:
        self._data = data
        self.path = path
        self.at = at
        self.size = len(data)

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.path}: {why}")

    def skip(self, nbytes: int) -> int:
        """Skip bytes and return where they begin."""
        start = self.at
        if nbytes > self.size - start:
            self.refuse(f"the file is truncated or damaged: {nbytes:.6g} bytes expected at byte {start}")
        self.at = start + nbytes
        return start

    def unsigned32(self) -> int:
        return int(_U32.unpack_from(self._data, self.skip(_U32.size))[0])

    def unsigned64(self) -> int:
        return int(_U64.unpack_from(self._data, self.skip(_U64.size))[0])

    def count(self, limit: int, what: str) -> int:
        count = self.unsigned64()
        if count > limit:
            self.refuse(f"the file claims {count:.6g} {what} (at most {limit} are supported)")
        return count

    def text(self, limit: int) -> str:
        length = self.count(limit, "bytes in one string")
        start = self.skip(length)
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError as error:
            self.refuse(f"the string at byte {start} is not UTF-8: {error.reason}")

    def value(self) -> Value:
        kind = self.unsigned32()
        if kind == ValueKind.STRING:
            return self.text(layout.MAX_TEXT_BYTES)
        if kind == ValueKind.ARRAY:
            return self._array()
        number = self._number(kind)
        found: int | float | bool = number.unpack_from(self._data, self.skip(number.size))[0]
        return found

    def _array(self) -> ArrayValue:
        """Skip a list. Strings are skipped one by one, since each states its own length."""
        kind = self.unsigned32()
        count = self.count(layout.MAX_ITEMS, "values in one list")
        found = ArrayValue(kind, count, self.at)
        if kind == ValueKind.STRING:
            for _ in range(count):
                self.skip(self.count(layout.MAX_TEXT_BYTES, "bytes in one string"))
            if self.at - found.start > layout.MAX_LIST_BYTES:
                size = f"{self.at - found.start:.6g} bytes"
                self.refuse(f"a list of {size} is not supported (at most {layout.MAX_LIST_BYTES})")
        else:
            self.skip(count * self._number(kind).size)
        return found

    def numbers(self, kind: int, count: int) -> list[int | float]:
        number = self._number(kind)
        start = self.skip(count * number.size)
        return list(struct.unpack_from(f"<{count}{number.format.lstrip('<')}", self._data, start))

    def _number(self, kind: int) -> struct.Struct:
        if kind not in layout.NUMBERS:
            what = "a list of lists" if kind == ValueKind.ARRAY else f"of kind {kind}"
            self.refuse(f"the metadata value before byte {self.at} is {what}, which is not supported")
        return layout.NUMBERS[kind]


def printable(name: str) -> str:
    """Return a name from the file as an error message may contain it: on one line and not too long."""
    name = name if len(name) <= 100 else name[:100] + "..."
    return name if name.isprintable() else repr(name)
