"""Estimate of a compiled grammar's memory, which the library does not report.

It grows: the states of its lexer are kept as outputs come to them, at 100 to 1,000 bytes each. So there are two
figures: what it takes when it is compiled, and what it has grown by after the outputs of `walk`. Up to 200 masks it
grows evenly, from there with the square root of the masks. `benchmarks.grammar_memory` compares that with what nine
kinds of grammars take.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from math import sqrt
from typing import NamedTuple

# Masks after which the growth is measured: those of `walk`.
MEASURED_MASKS_COUNT = 24
_EVEN_MASKS_COUNT = 200
# Where nothing was measured: bytes of any grammar, for each byte of its text, and for each byte of its longest literal.
_ANY_BYTES = 80 << 10
_BYTES_PER_BYTE = 45
_BYTES_PER_LITERAL_BYTE = 370
# Growth of any grammar, and for each text of bounded length.
_ANY_GROWTH_BYTES = 10 << 10
_BOUND_GROWTH_BYTES = 12 << 10
_BOUNDS = ('"maxLength"', '"minLength"')


class GrammarMemory(NamedTuple):
    """Bytes: `base` when compiled, `growth` after `MEASURED_MASKS_COUNT` masks."""

    base: int
    growth: int

    def after(self, masks: int, lanes: int = 1) -> int:
        """Return the bytes that it takes after so many masks, spread over so many copies of it."""
        return lanes * self.base + self.grown(masks, lanes)

    def grown(self, masks: int, lanes: int = 1) -> int:
        """Return by how many bytes it has grown."""
        each = masks / lanes
        even = min(each, _EVEN_MASKS_COUNT) / MEASURED_MASKS_COUNT
        return int(lanes * self.growth * even * sqrt(max(1.0, each / _EVEN_MASKS_COUNT)))


def estimated(text: str) -> GrammarMemory:
    """Return what a grammar takes by its text alone: that of an ordinary JSON schema."""
    longest = max(map(len, text.split('"')))
    base = _ANY_BYTES + _BYTES_PER_BYTE * len(text) + _BYTES_PER_LITERAL_BYTE * longest
    return GrammarMemory(base, _ANY_GROWTH_BYTES + _BOUND_GROWTH_BYTES * sum(map(text.count, _BOUNDS)))


def heap_bytes() -> int | None:
    """Return the bytes that this process has allocated, None where the system's library does not count them."""
    count = _counter()
    return None if count is None else count()


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@cache
def _counter() -> Callable[[], int] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    function.restype = _MallocInfo

    def count() -> int:
        said = function()
        return int(said.uordblks + said.hblkhd)

    return count
