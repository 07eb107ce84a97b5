"""A runner that computes nothing and lets time pass as a cost model says."""

from roseinfer.core.clock import ManualClock
from roseinfer.core.plan import Row, RowResult, StepPlan, StepResult
from roseinfer.sim.config import CostConfig

TOKEN = 1


def step_seconds(cost: CostConfig, rows: list[Row]) -> float:
    """step_ms + token_us * tokens + context_ns * sum over tokens of the positions they attend to."""
    tokens = sum(row.count for row in rows)
    # Position p attends to p + 1 tokens.
    attended = sum(row.count * row.start + row.count * (row.count + 1) // 2 for row in rows)
    return cost.step_ms * 1e-3 + cost.token_us * 1e-6 * tokens + cost.context_ns * 1e-9 * attended


class PricedRunner:
    """Steps run one after the other on a machine that is busy until `_free_s`; `collect` moves the clock there."""

    def __init__(self, cost: CostConfig, clock: ManualClock) -> None:
        self._cost = cost
        self._clock = clock
        self._free_s = 0.0
        self.busy_s = 0.0

    def submit(self, plan: StepPlan) -> tuple[StepPlan, float, float]:
        duration_s = step_seconds(self._cost, plan.rows)
        self._free_s = max(self._free_s, self._clock.now()) + duration_s
        self.busy_s += duration_s
        return plan, duration_s, self._free_s

    def sample(self, handle: tuple[StepPlan, float, float]) -> None:
        """Priced with the forward pass."""

    def collect(self, handle: tuple[StepPlan, float, float]) -> StepResult:
        plan, duration_s, done_s = handle
        self._clock.advance(max(0.0, done_s - self._clock.now()))
        rows = [RowResult(row.request_id, (TOKEN,) if row.sample else ()) for row in plan.rows]
        return StepResult(plan.step, rows, duration_s)

    def close(self) -> None:
        """Holds nothing."""
