"""An objective for a whole request (`e2e_ms`), for policies that otherwise know of first tokens and of paces only."""

from math import inf

from roseinfer.core.request import Request
from roseinfer.sched.cost import CostParams


def deadline_s(request: Request) -> float:
    """When its last token is due; inf without such an objective."""
    slo = request.slo
    return inf if slo is None or slo.e2e_s is None else request.arrival_s + slo.e2e_s


def latest_first_s(request: Request, length: float, params: CostParams) -> float:
    """The latest time of the first token at which the last can be in time, if `length` (tokens) are expected in all.

    Those behind the first take as long as on an idle machine: it is a lower bound. inf without such an objective.
    """
    alone_s = params.rows_s(1, request.prompt_len + length / 2)
    return deadline_s(request) - alone_s * max(0.0, length - 1)


def pace_s(request: Request, now_s: float, left: float) -> float:
    """Seconds that each of `left` tokens may take from now on; inf without such an objective, 0 past its deadline."""
    return max(0.0, deadline_s(request) - now_s) / max(1.0, left)
