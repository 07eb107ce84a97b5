"""A model in GGUF: one file, or several that were split from one."""

import re
from functools import lru_cache
from pathlib import Path

from roseinfer.core.errors import ModelNotFoundError, UnsupportedModelError
from roseinfer.gguf.layout import MAX_PARTS
from roseinfer.gguf.reader import GgufFile, TensorInfo, printable, read_file

SUFFIX = ".gguf"
MAX_KEPT = 16  # files whose metadata is kept: some kilobytes, as lists stay in the file
# What llama.cpp's gguf-split calls its parts.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, by its name, and not a model's folder."""
    return path.suffix == SUFFIX and path.is_file()


def part_names(name: str) -> list[str]:
    """The names of all files of the model whose only or first file has this name; no file is looked at.

    Raises `UnsupportedModelError` if it is a later part of several.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 0 < count <= MAX_PARTS:
        raise UnsupportedModelError(f"{name}: a model of {count} parts is not supported; at most {MAX_PARTS}")
    names = [f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
    if name != names[0]:
        raise UnsupportedModelError(f"{name} is a part of a model; name the first one, {Path(names[0]).name}")
    return names


def open_gguf(path: Path) -> GgufFile:
    """What the model whose only or first file this is says, with the tensors of all its parts.

    Raises `UnsupportedModelError` naming what is damaged or not supported, `ModelNotFoundError` for a missing part.
    """
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    names = part_names(path.name)
    if type(count) is not int or count not in (len(names), 0):
        raise UnsupportedModelError(f"{path}: split.count = {count!r}, its name says {len(names)}")
    tensors = dict(first.tensors)
    for number, name in enumerate(names[1:], start=1):
        tensors |= _part(path.with_name(name), number, first, tensors)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(names) > 1 and total != len(tensors):
        raise UnsupportedModelError(f"{path}: the parts hold {len(tensors)} tensors, split.tensors.count is {total!r}")
    return GgufFile(path, first.metadata, tensors)


def _read(path: Path) -> GgufFile:
    """`read_file`, once for each state of the file: a start asks several times, and to pass over the vocabulary, string
    by string, takes a good part of a second.
    """
    try:
        found = path.stat()
    except OSError:
        return read_file(path)  # which says what is wrong
    return _read_once(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=MAX_KEPT)
def _read_once(path: Path, state: tuple[int, ...]) -> GgufFile:
    return read_file(path)


def _part(path: Path, number: int, first: GgufFile, before: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    if not path.is_file():
        raise ModelNotFoundError(f"{first.path} is the first of several parts; {path.name} is not beside it")
    part = _read(path)
    if part.metadata.get("split.no") != number:
        raise UnsupportedModelError(f"{path}: split.no = {part.metadata.get('split.no')!r}, its name says {number}")
    twice = sorted(part.tensors.keys() & before.keys())
    if twice:
        raise UnsupportedModelError(f"{path}: tensor {printable(twice[0])} is in an earlier part, too")
    return part.tensors
