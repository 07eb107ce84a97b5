"""Options and constants of the slack policy."""

from dataclasses import dataclass

from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError
from roseinfer.sched.estimates import CostOptions, LengthOptions
from roseinfer.sched.policies.common.bursts import BurstOptions
from roseinfer.sched.policies.slack.capacity import MAX_STEP_PACES
from roseinfer.sched.prefill import PrefillOptions


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
    """Constants of the policy. `cost_weight`: seconds of deadline that a second of work is worth in the order.

    `roomy`: utilisation below which the price limit does not apply. `reserve`: share of the machine reserved for urgent
    or cheap requests. A request of mean work whose first token is due in `patience` TPOT objectives or later must leave
    all of it free. The other constants are bounds on a step and on waiting.
    """

    cost_weight: float = 4.0
    roomy: float = 0.7
    reserve: float = 0.1
    patience: float = 100.0
    price_window_s: float = 30.0
    price_fill: float = 1.05
    prefill_share: float = 0.35
    recent_s: float = 10.0  # time constant of the forecast of prompts
    longest_prompt_s: float = 0.2  # a longer prompt counts in the forecast as this
    spare_seats: float = 0.125  # share of seats that requests without objectives leave free
    rest_share: float = 0.1  # share of prompt time for aged requests without objectives
    longest_step: float = MAX_STEP_PACES  # in smallest TPOT objectives
    gap_limit: float = 4.0  # longest gap between two tokens, in the request's TPOT objectives
    smallest_chunk: int = 16
    catch_up: float = 32.0  # steps in which late requests should be in time again
    unsteady: float = 1.1  # longest real duration of a step, relative to the plan, when a first token is due at its end
    guard_steps: float = 6.0
    guard_chunk: int = 256
    ageing_s: float = 10.0  # used in place of a TTFT objective
    idle_limit_s: float = 1.0  # longest gap between tokens of requests that decode in spare time
    priority_s: float = 1.0  # per level
    priority_price: float = 1.1  # factor on the price per level: ten levels are a factor of 2.6
    priority_levels: int = 10  # higher and lower priorities count as this many levels
    # A client's length is trusted up to `hint_factor` times itself and `hint_tokens` more.
    hint_factor: float = 2.0
    hint_tokens: int = 32
    fairness_s: float = 1.0  # for a tenant that has twice its share
    refresh_s: float = 0.1
    looked_at: int = 16
