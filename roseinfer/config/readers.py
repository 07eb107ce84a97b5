"""Readers of the text of one option's value."""

import argparse
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from roseinfer.config.vllm_names import IgnoredValue
from roseinfer.config.vllm_options import our_value
from roseinfer.core.errors import ConfigError

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def flag_of(name: str) -> str:
    """Return the flag of a name or alias; an alias may already be a flag."""
    return name if name.startswith("-") else "--" + name.replace("_", "-")


def reader(kind: Any) -> Callable[[str], Any]:
    """Return the function that parses the text of one value. It raises ValueError."""
    if kind is int:
        return parse_int
    if typing.get_origin(kind) is tuple:
        return _PairReader(typing.get_args(kind))
    assert kind in (str, float), f"no option can be of type {kind}"
    return typing.cast(Callable[[str], Any], kind)


def parse_int(text: str) -> int:
    """Parse an integer. 8k is 8,000 and 8K is 8,192; likewise m, M, g and G."""
    factor = _SUFFIXES.get(text[-1:])
    if factor is None:
        return int(text)
    product = float(text[:-1]) * factor
    if not product.is_integer():
        raise ValueError(f"{text!r} is not an integer")
    return int(product)


parse_int.__name__ = "integer"  # argparse prints the function's name in its message


class ChoicesOrDefault(tuple[str, ...]):
    """ChoicesOrDefault of an option, which a word of vLLM may leave to the default."""

    def __contains__(self, value: object) -> bool:
        return value is None or super().__contains__(value)


class WordReader:
    """Parser of a value that also takes vLLM's word for it."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self._name = name
        self._read = read
        self.__name__ = read.__name__

    def __call__(self, text: str) -> Any:
        try:
            meant = our_value(self._name, text, "")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if isinstance(meant, IgnoredValue):
            print(f"roseinfer: note: {flag_of(self._name)} {text} is ignored: {meant.why}", file=sys.stderr)
            return None
        return self._read(meant) if isinstance(meant, str) else meant


class _PairReader:
    """Parser of `ID:VALUE` into a tuple of the given types."""

    __name__ = "ID:VALUE"

    def __init__(self, kinds: Sequence[type]) -> None:
        self._kinds = kinds

    def __call__(self, text: str) -> tuple[Any, ...]:
        parts = text.split(":")
        if len(parts) != len(self._kinds):
            raise ValueError(f"{text!r} is not a valid {self.__name__}")
        return tuple(kind(part) for kind, part in zip(self._kinds, parts, strict=True))


def type_name(kind: Any) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(kind, "ID:VALUE")
