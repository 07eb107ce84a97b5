"""Without a predictor: the lengths of the outputs that have ended, one table for all."""

import random
from bisect import bisect_right, insort

from roseinfer.core.request import Request
from roseinfer.sched.lengths.base import MIN_LEFT

SIZE = 4000
_START = [16 + round(i * (1023 - 16) / 31) for i in range(32)]


class EcdfLengths:
    """Quartiles of a sorted table; it starts with 32 lengths spread over 16..1023 and drops random ones when full."""

    def __init__(self, seed: int = 0) -> None:
        self._table = list(_START)
        self._rng = random.Random(seed)
        self._total = 0.0
        self._left: dict[int, float] = {}
        self._refresh()

    def total(self, request: Request) -> float:
        return min(self._total, float(request.params.max_tokens))

    def left(self, request: Request, outputs: int) -> float:
        found = self._left.get(outputs)
        if found is None:
            found = self._left[outputs] = self._conditional(outputs)
        return max(1.0, min(found, request.params.max_tokens - outputs))

    def finished(self, request: Request, outputs: int) -> None:
        if len(self._table) >= SIZE:
            self._table.pop(self._rng.randrange(len(self._table)))
        insort(self._table, outputs)
        self._refresh()

    def _refresh(self) -> None:
        q25, q50, q75 = self._quartiles(0)
        self._total = q25 / 4 + q50 / 2 + q75 / 4
        self._left.clear()

    def _conditional(self, outputs: int) -> float:
        above = bisect_right(self._table, outputs)
        if len(self._table) - above < 3:
            return max(0.3 * outputs, 32.0)
        return max(sum(self._quartiles(above)) / 3 - outputs, MIN_LEFT)

    def _quartiles(self, first: int) -> tuple[int, int, int]:
        table, span = self._table, len(self._table) - first - 1
        return table[first + span // 4], table[first + span // 2], table[first + 3 * span // 4]
