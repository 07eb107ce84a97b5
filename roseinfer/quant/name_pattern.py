"""Regular expressions over the names of layers, as configs of checkpoints have them. Any of them is matched in time
that grows with its length times the name's: Python's `re` tries all ways to divide a name, which may never end.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

_MAX_LENGTH = 1000
_MAX_DEPTH = 4  # of groups in groups
# A character, a class of them, or one of their kinds; what it is repeated by comes behind it.
_ATOM = re.compile(r"\\[dDwW]|\\[^\w\s]|\[\^?(?:\\[dDwW]|\\[^\w\s]|[^\\\[\]^])+\]|[^\\()\[\]{}*+?|^$]")
_REPEAT = re.compile(r"(?:([*+?])\??)?")  # lazy or not, the same names match

_Branch = tuple["_Item", ...]


@dataclass(frozen=True, slots=True)
class _Item:
    """what: a character, a choice of branches, or an end of the name. repeat: as in a pattern, "" for once."""

    what: "re.Pattern[str] | tuple[_Branch, ...] | Literal['^', '$']"
    repeat: str = ""


class NamePattern:
    """`text` as `re.match` reads it: it begins where the name does, and may end before it.

    It may hold characters, `.`, `\\d`, `\\w`, escaped punctuation and classes, each with `*`, `+` or `?`; groups with
    `|`, with `?` at most; `^` and `$`. Raises `ValueError` for everything else.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise ValueError(f"it has more than {_MAX_LENGTH} characters")
        self._branches, end = _read_branches(text, 0, 0)
        if end < len(text):
            raise ValueError(f"what begins at character {end + 1} is no simple regular expression")

    def matches(self, name: str) -> bool:
        return bool(_after_any(self._branches, name, {0}))


@lru_cache(maxsize=256)
def name_pattern(text: str) -> NamePattern:
    """A pattern that was read before is not read again."""
    return NamePattern(text)


def _read_branches(text: str, at: int, depth: int) -> tuple[tuple[_Branch, ...], int]:
    """The branches that begin at character `at`, and where they end: at what belongs to none."""
    branches: list[_Branch] = []
    items: list[_Item] = []
    while True:
        item, end = _read_item(text, at, depth)
        if item is not None:
            items.append(item)
            at = end
            continue
        branches.append(tuple(items))
        if text[at : at + 1] != "|":
            return tuple(branches), at
        items, at = [], at + 1


def _read_item(text: str, at: int, depth: int) -> tuple[_Item | None, int]:
    """The next item and where it ends, None if there is none at `at`."""
    first = text[at : at + 1]
    if first == "^":
        return _Item("^"), at + 1
    if first == "$":
        return _Item("$"), at + 1
    if first == "(" and depth < _MAX_DEPTH:
        branches, end = _read_branches(text, at + (3 if text.startswith("(?:", at) else 1), depth + 1)
        if text[end : end + 1] != ")":
            return None, at
        repeat, end = _read_repeat(text, end + 1)
        return (None, at) if repeat in ("*", "+") else (_Item(branches, repeat), end)
    atom = _ATOM.match(text, at)
    if atom is None:
        return None, at
    try:
        character = re.compile(atom[0])
    except re.error:  # a range that ends before it begins
        return None, at
    repeat, end = _read_repeat(text, atom.end())
    return _Item(character, repeat), end


def _read_repeat(text: str, at: int) -> tuple[str, int]:
    found = _REPEAT.match(text, at)
    assert found is not None, "it may be empty"
    return found[1] or "", found.end()


def _after_any(branches: tuple[_Branch, ...], name: str, starts: set[int]) -> set[int]:
    """Where matches of any branch end that begin at one of `starts`: positions in the name, each looked at once."""
    ends = set()
    for branch in branches:
        positions = starts
        for item in branch:
            positions = _after(item, name, positions)
        ends |= positions
    return ends


def _after(item: _Item, name: str, starts: set[int]) -> set[int]:
    what = item.what
    if what == "^":
        return starts & {0}
    if what == "$":
        return starts & {len(name)}
    if isinstance(what, tuple):
        ends = _after_any(what, name, starts)
        return ends | starts if item.repeat else ends
    ends = set(starts) if item.repeat in ("*", "?") else set()
    again = item.repeat in ("*", "+")
    reached = set(starts)  # where the next character may be one of these
    for at, character in enumerate(name):
        if at in reached and what.match(character):
            ends.add(at + 1)
            if again:
                reached.add(at + 1)
    return ends
