"""Demand of requests with objectives on a machine: work and deadlines."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log

from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.workload import Arrival

_MOST_LEVELS = 12
_LEVEL_RATIO = 1.15  # minimum ratio between levels where there would be more


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a request with objectives, in seconds of machine work and of time since its arrival.

    `steps`: after that of the first token. `pace_s`: maximum mean time between them. `first_s`, `end_s`: deadlines of
    the first and last token; inf = none. `least_s`: decoding time if it runs alone. `tries`: ways to serve it,
    (probability of being good, mean seconds of decoding), the surest last.
    """

    at_s: float
    prefill_s: float
    decode_s: float
    steps: int
    pace_s: float
    first_s: float
    end_s: float
    least_s: float
    tries: tuple[tuple[float, float], ...]

    @property
    def holds_s(self) -> float:
        """Return the minimum time for which its pace has to be held."""
        return self.steps * self.pace_s if self.steps else 0.0


def demand(arrival: Arrival, cost: CostParams) -> Demand | None:
    """Return the demand; None if even an idle machine could not meet the objectives."""
    slo, prompt, steps = arrival.slo, len(arrival.prompt_ids), arrival.output_len - 1
    assert slo is not None, "only requests with objectives demand something"
    prefill_s = cost.prefill_s(0, prompt, inf)
    decode_s = steps * (cost.row_s + cost.context_s * (prompt + (steps + 1) / 2))
    first_s = slo.ttft_s if slo.ttft_s is not None else inf
    pace_s = slo.tpot_s if slo.tpot_s is not None and steps else inf
    end_s = first_s + pace_s * steps if steps else first_s
    alone_s = cost.step_s + cost.prefill_s(0, prompt)
    least_s = steps * (cost.step_s + cost.experts_s(1)) + decode_s
    if slo.e2e_s is not None:
        end_s = min(end_s, slo.e2e_s)
        first_s = min(first_s, slo.e2e_s - least_s)
        pace_s = min(pace_s, (slo.e2e_s - alone_s) / steps) if steps else pace_s
    if first_s < alone_s or end_s < alone_s + least_s or (steps and steps * pace_s < least_s):
        return None
    return Demand(arrival.at_s, prefill_s, decode_s, steps, pace_s, first_s, end_s, least_s, ((1.0, decode_s),))


def promised(requests: Iterable[Arrival]) -> list[Arrival]:
    """Return the requests with objectives."""
    return [request for request in requests if request.slo is not None and not request.slo.empty]


def levels(paces: Iterable[float]) -> list[float]:
    """Return the distinct paces, tightest first, the last one inf. Many are merged into few that are no tighter."""
    found = sorted({pace for pace in paces if pace < inf})
    if len(found) > _MOST_LEVELS:
        ratio = max(_LEVEL_RATIO, (found[-1] / found[0]) ** (1 / _MOST_LEVELS))
        count = round(log(found[-1] / found[0]) / log(ratio)) + 1
        found = [found[0] * ratio**i for i in range(1, count + 1)]
    return [*found, inf]
