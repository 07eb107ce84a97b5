"""Dataclass fields that are also command-line options, and checks of their values.

`option()` attaches what the command line needs (help text, choices). The field's default is the option's default.
"""

from dataclasses import field, fields
from math import isfinite
from typing import Any

from roseinfer.core.errors import ConfigError


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
    spaced: bool = False,
    secret: bool = False,
) -> Any:
    """Return a dataclass field that is also a command-line option.

    `aliases`: other names of its flag. `spaced`: several values, separated by spaces, may follow the flag once.
    `secret`: the dataclass's repr omits the value.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "aliases": aliases, "spaced": spaced}
    return field(default=default, metadata=metadata, repr=not secret)


def check_choices(config: Any) -> None:
    """Raise `ConfigError` naming the first option whose value is not among its choices."""
    for f in fields(config):
        allowed = f.metadata.get("choices")
        if not allowed or (f.default is None and getattr(config, f.name) is None):
            continue
        if getattr(config, f.name) not in allowed:
            raise ConfigError(f"{f.name} must be one of {', '.join(allowed)}, got {getattr(config, f.name)!r}")


def positive_numbers(name: str, text: str | None) -> tuple[float, ...]:
    """Return the numbers of a comma-separated list. Raise `ConfigError` for anything but positive finite numbers."""
    try:
        numbers = tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if any(not (isfinite(number) and number > 0) for number in numbers):
        raise ConfigError(f"{name} must be positive, got {text}")
    return numbers


def check_positive(config: Any, *names: str) -> None:
    """Raise `ConfigError` naming the first of these options that is given and not positive."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive, got {value}")
