"""Typed access to the metadata of a GGUF file."""

import math
from typing import Any, NoReturn

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.gguf.reader import ArrayValue, GgufFile, printable


class MetadataFields:
    """Metadata by key; records which keys were read. Raises `UnsupportedModelError` for a value of the wrong kind."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._seen: set[str] = set()

    def refuse(self, key: str, hint: str = "") -> NoReturn:
        found = self._file.metadata.get(key)
        value = "a list" if isinstance(found, ArrayValue) else repr(found)
        value = value if len(value) <= 200 else value[:200] + "..."
        raise UnsupportedModelError(
            f"{self._file.path}: {printable(key)} = {value} is not supported{hint and '; ' + hint}"
        )

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

    def needed_text(self, key: str) -> str:
        return self._needed(key, self.text(key))

    def needed_integer(self, key: str) -> int:
        return self._needed(key, self.integer(key))

    def needed_number(self, key: str) -> float:
        return self._needed(key, self.number(key))

    def refuse_unread(self, prefix: str, harmless: frozenset[str]) -> None:
        """Refuse keys of `prefix` that are set and were not read: they may change the result."""
        for key, value in self._file.metadata.items():
            rest = key.removeprefix(prefix)
            if rest != key and value and key not in self._seen and rest not in harmless:
                self.refuse(key, "the key is unknown and may change the result")

    def _get(self, key: str, kind: type, hint: str) -> Any:
        self._seen.add(key)
        found = self._file.metadata.get(key)
        if found is not None and type(found) is not kind:
            self.refuse(key, hint)
        return found

    def _needed(self, key: str, found: Any) -> Any:
        if found is None:
            raise UnsupportedModelError(f"{self._file.path}: {key} is missing")
        return found
