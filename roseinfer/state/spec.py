"""Definition of what a layer keeps for each sequence, as plain data that is known before any weight is read."""

import math
from dataclasses import dataclass

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state. dtype: float32, bfloat16 or float16, as in `ModelSpec`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes_per_slot(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State of one layer for one sequence, which each step of the sequence overwrites."""

    parts: tuple[StatePart, ...]

    @property
    def bytes_per_slot(self) -> int:
        return sum(part.bytes_per_slot for part in self.parts)
