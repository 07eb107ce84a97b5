"""Models in GGUF: one file, or several parts of one."""

import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.gguf.layout import MAGIC, MAX_PARTS
from roseinfer.gguf.reader import GgufFile, TensorInfo, printable, read_file

SUFFIX = ".gguf"
MAX_CACHED_FILES = 16  # some kilobytes each, since lists stay in the file
# Names of the parts that llama.cpp's gguf-split writes.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Return True if this is a file with GGUF's suffix."""
    return path.suffix == SUFFIX and path.is_file()


def begins_as_gguf(path: Path) -> bool:
    """Return True if this file's first bytes are GGUF's, whatever its name."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


def part_names(name: str) -> list[str]:
    """Return the names of all files of the model whose only or first file is `name`, without looking at any file.

    Raise `UnsupportedModelError` if `name` is a later part.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 0 < count <= MAX_PARTS:
        raise UnsupportedModelError(f"{name}: a model of {count} parts is not supported (at most {MAX_PARTS})")
    names = [f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
    if name != names[0]:
        raise UnsupportedModelError(f"{name} is a later part of a model; use the first part, {Path(names[0]).name}")
    return names


def is_first_part(name: str) -> bool:
    """Return True unless `name` is a later part of a model in several files."""
    match = _PART.fullmatch(name)
    return match is None or int(match["number"]) == 1


def open_gguf(path: Path) -> GgufFile:
    """Read the metadata of the model whose only or first file is `path`, and the tensors of all its parts.

    Raise `UnsupportedModelError` naming what is damaged or not supported, `ModelNotFoundError` for a missing part.
    """
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    names = part_names(path.name)
    if type(count) is not int or count not in (len(names), 0):
        raise UnsupportedModelError(f"{path}: split.count is {count!r}, but the file's name says {len(names)}")
    tensors = dict(first.tensors)
    for number, name in enumerate(names[1:], start=1):
        tensors |= _part(path.with_name(name), number, first, tensors)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(names) > 1 and total != len(tensors):
        found = f"the parts hold {len(tensors)} tensors"
        raise UnsupportedModelError(f"{path}: {found}, but split.tensors.count is {total!r}")
    return GgufFile(path, first.metadata, tensors)


def _read(path: Path) -> GgufFile:
    """Call `read_file` once for each state of the file. A start reads it several times, and finding the end of the
    vocabulary takes up to half a second.
    """
    try:
        found = path.stat()
    except OSError:
        return read_file(path)  # raises the error
    return _read_once(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=MAX_CACHED_FILES)
def _read_once(path: Path, state: tuple[int, ...]) -> GgufFile:
    return read_file(path)


def _part(path: Path, number: int, first: GgufFile, before: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    if not path.is_file():
        raise ModelNotFoundError(f"{first.path} is the first of several parts; {path.name} is missing in its folder")
    part = _read(path)
    found = part.metadata.get("split.no")
    if found != number:
        raise UnsupportedModelError(f"{path}: split.no is {found!r}, but its name says {number}")
    twice = sorted(part.tensors.keys() & before.keys())
    if twice:
        raise UnsupportedModelError(f"{path}: tensor {printable(twice[0])} is in an earlier part already")
    return part.tensors
