"""What a simulated fleet has seen lately, and how many engines it should have for that."""

from collections import deque
from statistics import fmean

from roseinfer.router.fleet_size import FleetState, fleet_size, too_many_rejections
from roseinfer.sim.fleet_plan import Scaling

TICK_S = 5.0  # between two looks


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
        """`used`: the mean `engine_load` of the engines that run."""
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
        too_many = too_many_rejections(self._plan, len(self._promised), len(self._refused))
        size, self._calm_s = fleet_size(
            self._plan, FleetState(at_s, running, coming, self.used, too_many), self._calm_s
        )
        return size

    def grown(self) -> None:
        """One more serves: what was seen before says nothing of so many."""
        for seen in (self._used, self._promised, self._refused):
            seen.clear()

    def wait(self) -> None:
        """One went, or a simulation was against it: be patient again."""
        self._calm_s = None
