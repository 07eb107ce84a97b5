"""Names of layers that a checkpoint does not quantise, as configs list them; without torch.

An entry is a layer's name, with or without "model." before it; a part of the name, for all layers above or below it; a
shell pattern ("*.mlp.*"); or a Python regular expression after "re:", which has to match from the name's start.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

REGEX_PREFIX = "re:"


def is_ignored(name: str, entries: Iterable[str]) -> bool:
    """Return True if an entry names the layer with the tensor `name`.weight."""
    return any(_matches(entry, name) for entry in entries)


def check_ignored(entry: str) -> None:
    """Raise `ValueError` if an entry is an invalid regular expression."""
    if entry.startswith(REGEX_PREFIX):
        try:
            re.compile(entry.removeprefix(REGEX_PREFIX))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"invalid regular expression: {error}") from None


def _matches(entry: str, name: str) -> bool:
    if entry.startswith(REGEX_PREFIX):
        return re.match(entry.removeprefix(REGEX_PREFIX), name) is not None
    short, wanted = name.removeprefix("model."), entry.removeprefix("model.")
    if "*" in wanted:
        return fnmatchcase(short, wanted) or fnmatchcase(name, entry)
    return f".{short}.".startswith(f".{wanted}.") or short.endswith(f".{wanted}")
