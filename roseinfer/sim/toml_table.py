"""TOML tables with checked values: an error names the file, the table and the key."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from sys import float_info
from typing import Any, NoReturn

from roseinfer.core.errors import ConfigError

# Numbers beyond these overflow when they are multiplied, or never end.
MIN_POSITIVE_NUMBER, MAX_NUMBER = 1e-9, 1e12


class TomlTable:
    """One table of a TOML file. Methods return checked values, and `end` rejects keys that were not read."""

    def __init__(self, path: str, name: str, content: Any) -> None:
        self.path, self.name = path, name
        if not isinstance(content, dict):
            self.fail("", f"must be a table, got {content!r}")
        self._left = dict(content)
        self._known: list[str] = []

    @property
    def names(self) -> list[str]:
        """Keys that were not read yet."""
        return list(self._left)

    def fail(self, key: str, why: str) -> NoReturn:
        where = ".".join(part for part in (self.name, key) if part)
        raise ConfigError(f"workload: {self.path}: {where + ': ' if where else ''}{why}")

    def take(self, key: str, *default: Any) -> Any:
        self._known.append(key)
        if key in self._left:
            return self._left.pop(key)
        if not default:
            self.fail(key, "is missing")
        return default[0]

    def number(self, key: str, *default: Any, least: float = 0.0, above: float = -inf, most: float = MAX_NUMBER) -> Any:
        """Read a number of at least `least`, above `above`, and at most `most`; or the default."""
        value = self.take(key, *default)
        if default and value is default[0]:
            return value
        if not is_number(value) or not (least <= value <= most and value > above):
            limit = f"above {above:g}" if above >= least else f"of at least {least:g}"
            too_large = is_number(value) and value > most
            limit += f" and at most {most:g}" if most < MAX_NUMBER or too_large else ""
            self.fail(key, f"must be a number {limit}, got {value!r}")
        if 0 < value < MIN_POSITIVE_NUMBER:
            self.fail(key, f"must not be so close to 0, got {value!r}")
        return value

    def positive(self, key: str, *default: Any, most: float = MAX_NUMBER) -> Any:
        return self.number(key, *default, above=0.0, most=most)

    def count(self, key: str, *default: Any, least: int = 1) -> Any:
        """Read an integer."""
        value = self.take(key, *default)
        if default and value is default[0]:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(key, f"must be an integer of at least {least}, got {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, *default: Any) -> Any:
        value = self.take(key, *default)
        if not isinstance(value, str) and not (default and value is default[0]):
            self.fail(key, f"must be a string, got {value!r}")
        return value

    def choice(self, key: str, names: Sequence[str]) -> str:
        value = self.take(key)
        if value not in names:
            self.fail(key, f"must be one of {', '.join(names)}, got {value!r}")
        return str(value)

    def span(self, key: str) -> tuple[int, int]:
        """Read a pair [shortest, longest]."""
        value = self.take(key)
        whole = isinstance(value, list) and len(value) == 2 and all(type(part) is int for part in value)
        if not whole or not 1 <= value[0] <= value[1]:
            self.fail(key, f"must be [shortest, longest] in tokens, got {value!r}")
        return value[0], value[1]

    def table(self, key: str, *default: Any) -> "TomlTable":
        return self.within(key, self.take(key, *default))

    def within(self, key: str, content: Any) -> "TomlTable":
        return TomlTable(self.path, ".".join(part for part in (self.name, key) if part), content)

    def given(self, key: str, make: Callable[["TomlTable"], Any], default: Any) -> Any:
        """Read an optional table with `make`; without it return the default."""
        content = self.take(key, None)
        return default if content is None else make(self.within(key, content))

    def file(self, key: str) -> str:
        """Read a file's path, relative to the folder of this file."""
        return str(Path(self.path).parent / self.text(key))

    def end(self, *also: str) -> None:
        """Reject keys that were not read. `also`: further valid keys, for the message."""
        for key in self._left:
            self.fail(key, f"is unknown; use {', '.join(dict.fromkeys([*self._known, *also]))}")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max
