"""Step costs that an engine publishes: what a router and a restarted engine need of its cost model."""

from typing import NamedTuple


class StepCost(NamedTuple):
    """Seconds per step, per prompt token, per decoding row, per context token of such a row, and per expert that a
    layer reads. All are 0 if the engine's policy fits no cost model.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    row_s: float = 0.0
    context_s: float = 0.0
    expert_s: float = 0.0

    @property
    def is_known(self) -> bool:
        return any(self)
