"""Demand of running requests on the machine over several horizons, and whether one more request fits."""

from bisect import bisect_left
from collections.abc import Sequence

from roseinfer.sched.cost.params import CostParams

HORIZON_PACES = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # in smallest TPOT objectives
SHORT_COUNT = 2  # the first horizons, in which only prompts count: how soon one can be computed
MAX_STEP_PACES = 8.0  # longest step, in smallest TPOT objectives
MAX_CONSTANT_SHARE = 0.9  # of the time, for the constant cost of steps


class Demand:
    """Demand of running requests within several horizons: shares of the machine for decoding and for prompts, and steps
    per second.

    A request that is ahead of its token deadlines by `slack` needs nothing until then, and afterwards `weight` seconds
    of the machine per second. Over a horizon h that is weight * max(0, h - slack). No request is assumed to end: ended
    ones are replaced, and a wrong guess costs more than a right one gains. The rate of steps is the highest that any
    request needs within h, where half of its slack counts: requests that arrive need its pace too.

    `arriving`: share of the time that prompts took recently, and will take again. Prompts count for at least that much.
    Half of it is added to the known prompts, since these are part of it.

    For a model with experts, what a step and its rows cost depends on the rows per second, `visits` in each horizon.

    `rows`: for each horizon its seconds, and in it decoding, prompts, steps and visits.
    """

    def __init__(self, rows: Sequence[tuple[float, float, float, float, float]], arriving: float) -> None:
        self._rows = rows
        self._arriving = arriving
        self._priced: CostParams | None = None

    @classmethod
    def of(
        cls,
        requests: Sequence[tuple[float, float, float]],
        smallest_s: float,
        arriving: float = 0.0,
        experts: bool = False,
    ) -> "Demand":
        """Build the demand of decoding requests, each with slack, weight and pace. `experts`: the model has experts.

        With experts the constant cost is most of the tightest pace. So only the slack beyond a request's pace counts,
        because it needs a token in that time anyway; otherwise prompts would start without time for them.
        """
        if experts:
            requests = [(min(s, max(0.0, s - p)), w, p) for s, w, p in requests]
        least, rows = 1 / (MAX_STEP_PACES * smallest_s), []
        for h in [smallest_s * horizon for horizon in HORIZON_PACES]:
            decoding = sum([(h - s) * w for s, w, _ in requests if s < h]) / h
            # A request needs its pace in the rest of the horizon, where half of its slack counts.
            rates = [(h / (2 * s) if s >= h else 1 - s / (2 * h) if s > 0 else 1) / p for s, _, p in requests]
            steps = max([least, *rates])
            visits = sum([(h - s) / p for s, _, p in requests if s < h]) / h if experts else 0.0
            rows.append((h, decoding, 0.0, steps, visits))
        return cls(rows, arriving)

    def with_one(self, weight: float, pace_s: float, work_s: float, due_s: float) -> "Demand":
        """Return the demand with one more request, whose prompt takes `work_s` seconds within `due_s`. It takes
        `weight` from now on, and needs a step every `pace_s` once its prompt is computed. The prompt counts as work / h
        from the horizon on in which it is due.
        """
        visit = 1 / pace_s
        rows = [
            (
                h,
                decoding + weight,
                prompts + work_s / (h if h > due_s else due_s),
                own if (own := (1 - work_s / h) / pace_s) > steps else steps,
                visits + visit,
            )
            for h, decoding, prompts, steps, visits in self._rows
        ]
        return Demand(rows, self._arriving)

    def fits(self, limit: float, usable_share: float, cost: CostParams, weight: float = 0.0) -> bool:
        """True if the demand plus `weight` is at most the share `limit` of the available time in each horizon.
        Available is the usable share `usable_share` of the time, less the constant cost of steps.
        """
        if self._priced is not cost:
            self._price(cost)
        return weight <= min([limit * (usable_share - constant) - needed for needed, constant in self._needed])

    def taken_s(self, seconds: float, cost: CostParams) -> float:
        """Return what decoding and the constant cost of steps take of the next `seconds` (by the next horizon)."""
        _, decoding, _, steps, visits = self._rows[min(bisect_left(self._rows, (seconds,)), len(self._rows) - 1)]
        constant, rows = cost.step_shares(steps, visits, MAX_CONSTANT_SHARE)
        return seconds * (decoding + constant + rows)

    def _price(self, cost: CostParams) -> None:
        """Compute for each longer horizon what is needed, and the constant cost of steps."""
        self._priced, arriving, half = cost, self._arriving, 0.5 * self._arriving
        self._needed = [
            (decoding + (prompts + half if prompts > half else arriving) + rows, constant)
            for _, decoding, prompts, steps, visits in self._rows[SHORT_COUNT:]
            for constant, rows in [cost.step_shares(steps, visits, MAX_CONSTANT_SHARE)]
        ]
