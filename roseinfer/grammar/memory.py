"""Estimate of a compiled grammar's memory, which llguidance does not report.

The memory grows: states of the lexer are cached as outputs reach them, at 100 to 1,000 bytes each. So there are two
figures: the memory after compilation, and the growth after the outputs of `mask_time`. Memory grows linearly for 200
masks, then with the square root of the masks. `benchmarks.grammar_memory` compares this with nine kinds of grammars.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from math import sqrt
from typing import NamedTuple

# Masks after which the growth is measured: those of `mask_time`.
MEASURED_MASKS_COUNT = 24
_LINEAR_MASKS_COUNT = 200
# Without a measurement: bytes of any grammar, for each byte of its text, and for each byte of its longest literal.
_BASE_BYTES = 80 << 10
_TEXT_BYTES = 45
_LITERAL_BYTES = 370
# Growth of any grammar, and for each text of bounded length.
_BASE_GROWTH_BYTES = 10 << 10
_BOUND_GROWTH_BYTES = 12 << 10
_BOUNDS = ('"maxLength"', '"minLength"')


class GrammarMemory(NamedTuple):
    """Bytes: `base` when compiled, `growth` after `MEASURED_MASKS_COUNT` masks."""

    base: int
    growth: int

    def after(self, masks: int, lanes: int = 1) -> int:
        """Return the bytes that the grammar takes after `masks` masks, shared by `lanes` copies of it."""
        return lanes * self.base + self.grown(masks, lanes)

    def grown(self, masks: int, lanes: int = 1) -> int:
        """Return by how many bytes the copies have grown."""
        each = masks / lanes
        linear = min(each, _LINEAR_MASKS_COUNT) / MEASURED_MASKS_COUNT
        return int(lanes * self.growth * linear * sqrt(max(1.0, each / _LINEAR_MASKS_COUNT)))


def estimate_memory(text: str) -> GrammarMemory:
    """Return an estimate by the grammar's text alone, as of an ordinary JSON schema."""
    longest = max(map(len, text.split('"')))
    base = _BASE_BYTES + _TEXT_BYTES * len(text) + _LITERAL_BYTES * longest
    return GrammarMemory(base, _BASE_GROWTH_BYTES + _BOUND_GROWTH_BYTES * sum(map(text.count, _BOUNDS)))


def heap_bytes() -> int | None:
    """Return the bytes that this process has allocated, None if the C library does not count them."""
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
        info = function()
        return int(info.uordblks + info.hblkhd)

    return count
