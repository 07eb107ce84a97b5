"""Typed access to the fields of a config. Fields that were not read are refused, since they may change the result."""

from collections.abc import Iterator
from typing import Any, NoReturn

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.core.json_file import field_name, shortened

# Upper bound of every count in a config. Larger values are mistakes, and would cause endless loops and huge tables.
MAX_SIZE = 2**24
# Each layer costs time at start even if it is empty.
MAX_LAYERS = 2**12
# Range of float32, in which norms and rotary positions are computed.
MIN_FLOAT, MAX_FLOAT = 2.0**-126, 2.0**127


class ConfigFields:
    """Dict of a config that records which keys were read. `where` begins every error.

    `max_model_len`: the context that will be used, None for the longest.
    """

    def __init__(self, data: dict[str, Any], where: str, max_model_len: int | None = None) -> None:
        self._data = data
        self.where = where
        self.max_model_len = max_model_len
        self._seen: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def get(self, key: str, default: Any = None) -> Any:
        self._seen.add(key)
        return self._data.get(key, default)

    def assume(self, **defaults: Any) -> None:
        """Give absent and null fields a family's defaults."""
        absent = {key: value for key, value in defaults.items() if self._data.get(key) is None}
        self._data = {**self._data, **absent}

    def refuse(self, key: str, value: Any, hint: str = "") -> NoReturn:
        message = f"{self.where}: {field_name(key)} = {shortened(value)} is not supported"
        raise UnsupportedModelError(f"{message}; {hint}" if hint else message)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModelError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.refuse(key, value, "a positive integer is needed")
        if value > MAX_SIZE:
            self.refuse(key, value, f"no model has more than {MAX_SIZE}")
        return value

    def num_layers(self, key: str = "num_hidden_layers") -> int:
        """Return the number of layers. Raise before a spec of each is made, which takes a second per 100,000."""
        count = self.integer(key)
        if count > MAX_LAYERS:
            raise UnsupportedModelError(f"{self.where}: {count} layers are not supported; at most {MAX_LAYERS}")
        return count

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise UnsupportedModelError(f"{self.where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not MIN_FLOAT <= value <= MAX_FLOAT:
            self.refuse(key, value, "a positive number that float32 holds is needed")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(key, value, "true or false is needed")
        return value

    def choice(self, key: str, allowed: dict[str, str], default: str) -> str:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            self.refuse(key, value, f"known: {', '.join(allowed)}")
        return allowed[value]

    def need(self, *keys: str) -> None:
        """Raise `UnsupportedModelError` unless all fields are present: other software assumes different defaults for
        them.
        """
        for key in keys:
            if self.get(key) is None:
                raise UnsupportedModelError(f"{self.where}: {key} is missing")

    def only(self, key: str, *wanted: Any, hint: str = "") -> None:
        """Refuse the field unless it is absent, null or one of `wanted`."""
        if self.get(key) not in (None, *wanted):
            self.refuse(key, self._data[key], hint)

    def ignore(self, *keys: str) -> None:
        """Mark fields as read that do not change the logits of this family."""
        self._seen.update(keys)

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, which may be absent."""
        value = self.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self.refuse(key, value, "a list of names is needed")
        return tuple(value)

    def inner(self, key: str) -> "ConfigFields | None":
        """Return an inner object, whose fields the caller must all read; None if it is absent, null or empty."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, value, "an object is needed")
        if not value:
            return None
        return ConfigFields(value, f"{self.where} {key}", self.max_model_len)

    def refuse_unread(self, harmless: frozenset[str] = frozenset(), prefixes: tuple[str, ...] = ()) -> None:
        for key, value in self._data.items():
            known = key in self._seen or key in harmless or key.startswith(prefixes)
            if value and not known:
                self.refuse(key, value, "the field is unknown and may change the result")
