"""What no policy could exceed."""

from collections.abc import Sequence
from math import ceil, inf

from roseinfer.sched.cost import CostParams
from roseinfer.sim.machine import Machine
from roseinfer.sim.workload import Arrival


def capacity(requests: Sequence[Arrival], machine: Machine, target: float = 0.99) -> float:
    """Requests a second of such a mix at which `target` of those with objectives can be served.

    Seconds of work that requests bring, the cheap served first, have to fit into what steps leave that are as long as
    the smallest TPOT among the served allows; the set of TPOTs that allows most counts. The machine is as slow as at
    the start; its noise and stalls count for nothing, nor does best effort.
    """
    slow = machine.slowness(0.0)
    promised = [arrival for arrival in requests if arrival.slo is not None and not arrival.slo.empty]
    cost = machine.cost.slower(slow)
    works = [(_tpot_s(arrival), _work_s(arrival, cost)) for arrival in promised]
    wanted = ceil(target * len(works))
    best = 0.0
    for level in {tpot_s for tpot_s, _ in works}:
        able = sorted(work_s for tpot_s, work_s in works if tpot_s >= level)[:wanted]
        if len(able) == wanted and able:
            best = max(best, (1 - cost.step_s / level) * len(requests) / sum(able))
    return best


def _tpot_s(arrival: Arrival) -> float:
    tpot_s = arrival.slo.tpot_s if arrival.slo else None
    return inf if tpot_s is None else tpot_s


def _work_s(arrival: Arrival, cost: CostParams) -> float:
    """What it adds to the steps that compute it."""
    prompt, output = len(arrival.prompt_ids), arrival.output_len
    prefill_s = cost.token_s * prompt + cost.pair_s * prompt * (prompt + 1) / 2
    return prefill_s + output * (cost.row_s + cost.context_s * (prompt + output / 2))
