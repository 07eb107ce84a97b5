"""Tables of measured configs, in JSON files beside the kernels that they tune.

A table records where and when it was measured. Each entry names a shape, the fastest kernel for it and that kernel's
config. The kernel "library" has no config: there the library's own kernels are faster.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

C = TypeVar("C")

LIBRARY = "library"
# Remarks of an entry for people to read: the model with this shape, times per call, notes.
_REMARKS = frozenset({"model", "us", "library_us", "note"})


class TuningError(ValueError):
    """A tuning file that does not fit the kernels."""


class TuningTable(Generic[C]):
    """Configs by shape. The file is read when the first one is looked up."""

    def __init__(self, path: Path, shape: Mapping[str, Any], kernels: Mapping[str, type[C]]) -> None:
        """shape: the names and types of a shape's numbers, in order. kernels: the class of each kernel's configs."""
        self._path = path
        self._shape = shape
        self._kernels = kernels

    def choose(self, shape: tuple[Any, ...], rule: Callable[..., C | None]) -> C | None:
        """Return the config that was measured for `shape`, or `rule(*shape)`; None if the library is faster."""
        entries = self.entries
        return entries[shape] if shape in entries else rule(*shape)

    @cached_property
    def entries(self) -> Mapping[tuple[Any, ...], C | None]:
        """Configs by shape, in the order of the file. Raises `TuningError` for a file that does not fit."""
        try:
            document = json.loads(self._path.read_text(), object_pairs_hook=_unique)
            _check_names(document, required={"measured", "entries"}, optional={"note"})
            entries: dict[tuple[Any, ...], C | None] = {}
            for entry in document["entries"]:
                shape, config = self._entry(entry)
                if shape in entries:
                    raise TuningError(f"the shape {entry['shape']} appears twice")
                entries[shape] = config
        except (TypeError, ValueError) as error:
            raise TuningError(f"invalid tuning table {str(self._path)!r}: {error}") from error
        return entries

    def _entry(self, entry: dict[str, Any]) -> tuple[tuple[Any, ...], C | None]:
        _check_names(entry, required={"shape", "kernel"}, optional={"config", *_REMARKS})
        shape, kernel = entry["shape"], entry["kernel"]
        _check_names(shape, required=self._shape.keys())
        found = tuple(_checked(name, shape[name], hint) for name, hint in self._shape.items())
        if kernel != LIBRARY and kernel not in self._kernels:
            raise TuningError(f"unknown kernel {kernel!r} (known: {', '.join([*self._kernels, LIBRARY])})")
        if (kernel == LIBRARY) == ("config" in entry):
            raise TuningError(f"the shape {shape} has a config and the kernel {LIBRARY!r}, or neither")
        return found, None if kernel == LIBRARY else _made(self._kernels[kernel], entry["config"])


def _made(kind: type[Any], values: Any) -> Any:
    """Return an object of the dataclass `kind`; every field is given or has a default, and has its type."""
    hints = get_type_hints(kind)
    _check_names(values, required={field.name for field in fields(kind) if field.default is MISSING}, optional=hints)
    return kind(**{name: _checked(name, value, hints[name]) for name, value in values.items()})


def _checked(name: str, value: Any, hint: Any) -> Any:
    if is_dataclass(hint):
        return _made(hint, value)
    if type(value) not in (get_args(hint) or (hint,)):  # not isinstance: a bool would pass as an int
        raise TuningError(f"{name}: {value!r} has another type than {getattr(hint, '__name__', hint)}")
    return value


def _check_names(values: Any, required: Any, optional: Any = frozenset()) -> None:
    if not isinstance(values, dict):
        raise TuningError(f"{values!r} is not an object")
    for what, names in (
        ("missing", set(required) - values.keys()),
        ("unknown", values.keys() - set(required) - set(optional)),
    ):
        if names:
            raise TuningError(f"{what} names: {', '.join(sorted(names))}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise TuningError(f"a name appears twice among {', '.join(name for name, _ in pairs)}")
    return values
