"""Dataclass fields that are also command-line options, and checks of their values.

`option()` attaches what the command line needs (help text, choices). The field's default is the option's default.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import field, fields
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from roseinfer.core.errors import ConfigError

Number = TypeVar("Number", int, float)


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
    spaced: bool = False,
    secret: bool = False,
    written: bool = False,
) -> Any:
    """Return a dataclass field that is also a command-line option.

    `aliases`: other names of its flag. `spaced`: several values, separated by spaces, may follow the flag once.
    `secret`: the dataclass's repr omits the value. `written`: it names a file that is written when the command ends.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "aliases": aliases, "spaced": spaced}
    metadata["written"] = written
    return field(default=default, metadata=metadata, repr=not secret)


def check_choices(config: Any) -> None:
    """Raise `ConfigError` naming the first option whose value is not among its choices."""
    for f in fields(config):
        allowed = f.metadata.get("choices")
        if not allowed or (f.default is None and getattr(config, f.name) is None):
            continue
        if getattr(config, f.name) not in allowed:
            raise ConfigError(f"{f.name} must be one of {', '.join(allowed)}, got {getattr(config, f.name)!r}")


def positive_numbers(name: str, text: str | None, kind: Callable[[str], Number]) -> tuple[Number, ...]:
    """Return the numbers of a comma-separated list. `kind`: int or float. Raise `ConfigError` for anything but positive
    finite numbers.
    """
    try:
        numbers = tuple(kind(part) for part in (text or "").split(",") if part.strip())
        valid = all(isfinite(number) and number > 0 for number in numbers)
    except (ValueError, OverflowError):
        valid = False
    if not valid:
        raise ConfigError(f"{name} must be positive numbers with commas between them, got {text!r}")
    return numbers


def check_writable(name: str, path: str) -> None:
    """Raise `ConfigError` that names the option if the file cannot be written. The file itself is not touched."""
    file = Path(path)
    cause = 0
    if file.is_dir():
        cause = errno.EISDIR
    elif not file.parent.is_dir():
        cause = errno.ENOENT
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        cause = errno.EACCES
    if cause:
        raise ConfigError(f"{name}: cannot write {path!r}: {os.strerror(cause)}")


def check_positive(config: Any, *names: str) -> None:
    """Raise `ConfigError` naming the first of these options that is given and not positive."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive, got {value}")


def check_within(config: Any, least: float, most: float, *names: str) -> None:
    """Raise `ConfigError` naming the first of these options that is given and not within these limits."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name} must be within [{least:g}, {most:g}], got {value}")


def check_address(config: Any, name: str) -> None:
    """Raise `ConfigError` if an option is no address to listen on. To the system, an empty one means all addresses."""
    value = getattr(config, name)
    if not value.strip():
        raise ConfigError(f"{name} must be an address, got {value!r}; 0.0.0.0 = all addresses")
