"""Terms of the slack policy: options, constants, learnt margins, and what tenants and priorities change."""

from dataclasses import dataclass
from functools import lru_cache
from math import inf, log

from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Request
from roseinfer.sched.estimates import CostOptions, LengthOptions
from roseinfer.sched.policies.common.bursts import BurstOptions
from roseinfer.sched.prefill import PrefillOptions

MAX_PRIORITY = 10  # higher and lower priorities count as this one
PRIORITY_S = 1.0  # of deadline, per level
PRICE_PER_LEVEL_SHARE = 0.1  # ten levels are a factor of 2.6 on the price
FAIRNESS_S = 1.0  # of deadline, for a tenant that has twice its share
AGEING_S = 10.0  # in place of a TTFT objective, and until a request without objectives comes before others
MAX_IDLE_S = 1.0  # between tokens of requests that decode in spare time
REFRESH_S = 0.1  # between two computations of demand
REST_SHARE = 0.1  # of the time for prompts, for aged requests without objectives
ROOMY_SHARE = 0.7  # of the machine, up to which requests above the price limit start


@dataclass(frozen=True, kw_only=True)
class SlackOptions(PrefillOptions, CostOptions, LengthOptions, BurstOptions):
    """Options of `slack`. `decode_first` and `BurstOptions` apply only while no request has objectives (fifo plans)."""

    slack_fairness: float = option(
        0.0,
        "under overload, 0 to 1: 0 = serve most requests, the cheapest first; 1 = long requests have equal chances",
    )

    def __post_init__(self) -> None:
        PrefillOptions.__post_init__(self)
        LengthOptions.__post_init__(self)
        BurstOptions.__post_init__(self)
        if not 0 <= self.slack_fairness <= 1:
            raise ConfigError(f"slack_fairness must be 0 to 1, got {self.slack_fairness}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants that tests and ablations replace. `cost_weight`: seconds of deadline that a second of work is worth in
    the order. `reserve`: share of the machine reserved for urgent or cheap requests. `looked_at`: waiting requests of
    each list that one step considers.
    """

    cost_weight: float = 4.0
    reserve: float = 0.1
    looked_at: int = 16


def level(request: Request) -> int:
    """Return its priority within the limits."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority))


def favour_s(request: Request, excess: float) -> float:
    """Return the seconds by which its turn is later, for its priority and for its tenant's `excess` over its share."""
    return PRIORITY_S * level(request) + FAIRNESS_S * excess


def price_factor(request: Request, excess: float) -> float:
    """Return the factor on its price: more for a heavy tenant, less for a better priority."""
    return float((1 + excess) * (1 + PRICE_PER_LEVEL_SHARE) ** level(request))


class Margins:
    """Margins: the shares of TPOT objectives by which token deadlines are brought forward. Each level of objectives
    (within about 10%) has its own, because a few strict requests would not count among many loose ones.

    A margin grows a little with each finished request that came close to its limit, and shrinks very little with each
    other one. Many may be late for one reason, as when the machine becomes slower: requests whose first token came
    before the margin grew add at most `MOST` to it together. In the steady state one in 21 comes close to its limit.
    """

    START, FLOOR, CEILING = 0.02, 0.005, 0.15
    UP, DOWN, NEAR, MOST = 0.004, 0.0002, 0.995, 0.015

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._limits: dict[int, tuple[float, float]] = {}  # on growth, for requests from before a time

    def of(self, tpot_s: float) -> float:
        return self._values.get(_margin_level(tpot_s), self.START)

    def observe(self, seen_s: float, tpot_s: float, first_s: float, now_s: float) -> None:
        """Learn from a request that has ended: its TPOT, its objective, and the time of its first token."""
        found, old = _margin_level(tpot_s), self.of(tpot_s)
        margin = old - self.DOWN
        if seen_s > self.NEAR * tpot_s:
            before_s, limit = self._limits.get(found, (-inf, 0.0))
            if first_s > before_s:
                limit = old + self.MOST
                self._limits[found] = now_s, limit
            margin = min(old + self.UP, limit)
        self._values[found] = min(self.CEILING, max(self.FLOOR, margin))


@lru_cache(1024)
def _margin_level(tpot_s: float) -> int:
    return round(log(tpot_s) / log(1.1))
