"""Typed access to the metadata of a GGUF file."""

import math
from typing import Any, NoReturn

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.reader import ArrayValue, GgufFile, printable


class MetadataFields:
    """Metadata by key; records which keys were read. Raises `UnsupportedModelError` for a value of the wrong kind.

    prefix: what every key begins with, after which callers name them.
    """

    def __init__(self, file: GgufFile, prefix: str = "") -> None:
        self.file = file
        self._prefix = prefix
        self._seen: set[str] = set()

    def refuse(self, key: str, hint: str = "") -> NoReturn:
        found = self.file.metadata.get(self._prefix + key)
        value = "a list" if isinstance(found, ArrayValue) else repr(found)
        value = value if len(value) <= 200 else value[:200] + "..."
        named = printable(self._prefix + key)
        raise UnsupportedModelError(f"{self.file.path}: {named} = {value} is not supported{hint and '; ' + hint}")

    def text(self, key: str) -> str | None:
        return self._get(key, str, "a string is needed")

    def flag(self, key: str) -> bool | None:
        return self._get(key, bool, "true or false is needed")

    def integer(self, key: str) -> int | None:
        return self._get(key, int, "one integer is needed")

    def number(self, key: str) -> float | None:
        found = self._get(key, float, "one number is needed")
        if found is not None and not math.isfinite(found):
            self.refuse(key, "a finite number is needed")
        return found

    def values(self, key: str) -> list[int | float] | None:
        """Return a list of numbers or flags; one value is a list of one."""
        self._seen.add(key)
        found = self.file.metadata.get(self._prefix + key)
        if isinstance(found, ArrayValue):
            return self.file.numbers(self._prefix + key)
        if isinstance(found, str):
            self.refuse(key, "a list of numbers is needed")
        return None if found is None else [found]

    def needed_text(self, key: str) -> str:
        return self._needed(key, self.text(key))

    def needed_integer(self, key: str) -> int:
        return self._needed(key, self.integer(key))

    def needed_number(self, key: str) -> float:
        return self._needed(key, self.number(key))

    def refuse_unread(self, harmless: frozenset[str]) -> None:
        """Refuse keys with the prefix that are set and were not read: they may change the result."""
        for whole, value in self.file.metadata.items():
            key = whole.removeprefix(self._prefix)
            if whole.startswith(self._prefix) and value and key not in self._seen and key not in harmless:
                self.refuse(key, "the key is unknown and may change the result")

    def _get(self, key: str, kind: type, hint: str) -> Any:
        self._seen.add(key)
        found = self.file.metadata.get(self._prefix + key)
        if found is not None and type(found) is not kind:
            self.refuse(key, hint)
        return found

    def _needed(self, key: str, found: Any) -> Any:
        if found is None:
            raise UnsupportedModelError(f"{self.file.path}: {self._prefix}{key} is missing")
        return found
