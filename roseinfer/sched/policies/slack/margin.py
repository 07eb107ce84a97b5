"""The margin by which token deadlines are brought forward, learnt from how close finished requests came."""

from dataclasses import dataclass


@dataclass(slots=True)
class Margin:
    """A share of the TPOT objective. Up a little for each request near its limit, down very little for each other.

    In the steady state about one request in 21 comes near its limit.
    """

    value: float = 0.02
    floor: float = 0.005
    ceiling: float = 0.15
    up: float = 0.004
    down: float = 0.0002
    near: float = 0.995

    def observe(self, tpot_s: float, objective_s: float) -> None:
        step = self.up if tpot_s > self.near * objective_s else -self.down
        self.value = min(self.ceiling, max(self.floor, self.value + step))
