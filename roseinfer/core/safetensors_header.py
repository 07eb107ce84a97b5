"""Tensors that a folder's safetensors files hold, by their headers; without the library, which needs tensors."""

from pathlib import Path
from typing import NamedTuple

from roseinfer.core.json_file import parse_json, read_json

MAX_HEADER_BYTES = 100_000_000  # by the format's definition


class HeaderEntry(NamedTuple):
    """Entry of a header: the format's name of a dtype, such as "BF16", and the shape."""

    dtype: str
    shape: tuple[int, ...]


def loaded_files(folder: Path) -> list[Path]:
    """Return the files that are loaded, whether they exist or not; a folder may have the same weights in others, too.

    The loader reports an invalid index.
    """
    try:
        index = read_json(folder / "model.safetensors.index.json")
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return [folder / "model.safetensors"]


def read_header(file: Path) -> dict[str, HeaderEntry]:
    """Return the tensors of a file by name; none if the file cannot be read, which the loader reports."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            tensors = parse_json(opened.read(min(size, MAX_HEADER_BYTES)))
        tensors.pop("__metadata__", None)
        return {name: HeaderEntry(str(of["dtype"]), tuple(map(int, of["shape"]))) for name, of in tensors.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError):
        return {}
