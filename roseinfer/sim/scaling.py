"""When there should be more engines, or fewer: by what those that run promise, and by what they turned away."""

from collections import deque
from math import ceil, floor
from statistics import fmean

from roseinfer.core.promise import Promise
from roseinfer.sim.fleet_plan import Scaling

TICK_S = 5.0  # between two looks
ENOUGH = 20  # requests in the window, below which a share of refusals says nothing


LEAST_ROOM = 0.13  # of a second, which an engine is taken to have for work at any pace


def fullness(promise: Promise) -> float:
    """What an engine is asked for, of what it can do at the pace that its tightest request needs; 1 = full.

    The constant cost of steps is not part of either: it is the same for one request as for a hundred, so a fleet twice
    as large pays it twice.
    """
    pace = promise.cost_s[0] / promise.smallest_s
    return (promise.busy + promise.weights + promise.arriving) / max(LEAST_ROOM, promise.keep - pace)


class Scaler:
    """What was seen lately, and what follows from it. Times do not run backwards."""

    def __init__(self, plan: Scaling) -> None:
        self._plan = plan
        self._used: deque[tuple[float, float]] = deque()
        self._promised: deque[float] = deque()
        self._refused: deque[float] = deque()
        self._calm_s: float | None = None  # since when fewer would do

    def promised(self, at_s: float) -> None:
        """A request with objectives came."""
        self._promised.append(at_s)

    def refused(self, at_s: float) -> None:
        """One was turned away that an idle engine would have kept."""
        self._refused.append(at_s)

    def look(self, at_s: float, used: float) -> None:
        """`used`: the mean `fullness` of the engines that run."""
        self._used.append((at_s, used))
        since_s = at_s - self._plan.window_s
        while self._used[0][0] < since_s:
            self._used.popleft()
        for seen in (self._promised, self._refused):
            while seen and seen[0] < since_s:
                seen.popleft()

    @property
    def used(self) -> float:
        """Mean over the window."""
        return fmean(used for _, used in self._used)

    def wanted(self, at_s: float, running: int, coming: int) -> int:
        """How many engines there should be, those that are `coming` included; asked behind `look`."""
        plan, size = self._plan, running + coming
        used, asked = self.used, len(self._promised)
        refusing = asked >= ENOUGH and len(self._refused) > plan.refused * asked
        if used > plan.high or refusing:
            self._calm_s = None
            more = ceil(running * used / plan.aim)
            if refusing and not coming:
                more = max(more, size + 1)
            return min(plan.most, max(size, more))
        if coming or size <= plan.least or used * running >= plan.low * (running - 1):
            self._calm_s = None
        elif self._calm_s is None:
            self._calm_s = at_s
        elif floor(at_s - self._calm_s) >= plan.patience_s:
            return size - 1
        return size

    def grown(self) -> None:
        """One more serves: what was seen before says nothing of so many."""
        for seen in (self._used, self._promised, self._refused):
            seen.clear()

    def wait(self) -> None:
        """One went, or a simulation was against it: be patient again."""
        self._calm_s = None
