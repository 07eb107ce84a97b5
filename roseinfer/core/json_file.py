"""Parse untrusted JSON into checked values, or raise one `ValueError`."""

import json
import math
from pathlib import Path
from typing import Any

from roseinfer.core.errors import UnsupportedModelError

# The index of the largest checkpoints has 2**24 bytes.
MAX_FILE_BYTES = 2**26
MAX_DEPTH = 64
_MAX_SHOWN_CHARS = 100


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raise `UnsupportedModelError` that names the file."""
    try:
        value = read_json(path)
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} does not hold a JSON object")
    return value


def read_json(path: Path) -> Any:
    """Return the value in a file. Raise `OSError`, or `ValueError` as `parse_json` does."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"the file has more than {MAX_FILE_BYTES} bytes")
    return parse_json(data)


def parse_json(data: str | bytes) -> Any:
    """Return the value of a JSON text (bytes: UTF-8).

    Raise `ValueError` for what is not JSON or nested too deeply, and for numbers that are not finite and text that is
    not Unicode, naming the field.
    """
    try:
        value = json.loads(data.decode() if isinstance(data, bytes) else data)
    except RecursionError:
        raise ValueError(f"nested too deeply (at most {MAX_DEPTH} levels)") from None
    except ValueError as error:  # also of bytes that are not UTF-8, and of integers with thousands of digits
        raise ValueError(f"not JSON: {error}") from None
    _check(value)
    return value


def shortened(value: Any, chars: int = 200) -> str:
    """Return `value` as a message shows it."""
    text = repr(value)
    return text if len(text) <= chars else f"{text[:chars]}..."


def field_name(name: str) -> str:
    """Return the name of a field as a message shows it."""
    return name if len(name) <= _MAX_SHOWN_CHARS and name.isprintable() else shortened(name, _MAX_SHOWN_CHARS)


def _check(value: Any) -> None:
    """Walk without recursion: `left` holds values with their places and depths."""
    left: list[tuple[Any, str, int]] = [(value, "", 0)]
    while left:
        value, place, depth = left.pop()
        if isinstance(value, str):
            _check_text(value, place)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise ValueError(f"{field_name(place) or 'the value'} = {value} is not a finite number")
        elif isinstance(value, dict | list):
            if depth == MAX_DEPTH:
                raise ValueError(f"nested too deeply (at most {MAX_DEPTH} levels)")
            if isinstance(value, dict):
                for key, inner in value.items():
                    _check_text(key, f"a key in {place}" if place else "a key")
                    left.append((inner, f"{place}.{key}" if place else key, depth + 1))
            else:
                left.extend((inner, f"{place}[{index}]", depth + 1) for index, inner in enumerate(value))


def _check_text(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        where = f"{field_name(place) or 'the value'} = {text[:_MAX_SHOWN_CHARS]!a}"
        raise ValueError(f"{where} holds a lone surrogate, which is not Unicode") from None
