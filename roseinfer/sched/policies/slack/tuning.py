"""The slack policy's options and constants."""

from dataclasses import dataclass

from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError
from roseinfer.sched.estimates import CostOptions, LengthOptions
from roseinfer.sched.policies.common.bursts import BurstOptions
from roseinfer.sched.policies.slack.capacity import LONGEST_STEP
from roseinfer.sched.prefill import PrefillOptions


@dataclass(frozen=True, kw_only=True)
class SlackOptions(PrefillOptions, CostOptions, LengthOptions, BurstOptions):
    """`decode_first` and those of `BurstOptions` count while nobody has objectives, when fifo plans; others always."""

    slack_fairness: float = option(
        0.0,
        "under overload, 0 to 1: 0 = the cheapest requests are served, most of all; 1 = long ones have equal chances",
    )

    def __post_init__(self) -> None:
        PrefillOptions.__post_init__(self)
        LengthOptions.__post_init__(self)
        BurstOptions.__post_init__(self)
        if not 0 <= self.slack_fairness <= 1:
            raise ConfigError(f"slack_fairness must be 0 to 1, got {self.slack_fairness}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """`cost_weight`: seconds of due time that a second of work is worth in the order. `roomy`: the utilisation below
    which the price limit does not hold. `reserve`: share of the machine that is kept for requests that are urgent or
    cheap; one of mean work whose first token is due in `patience` TPOT objectives or more leaves all of it free. The
    others are bounds on a step and on waiting.
    """

    cost_weight: float = 4.0
    roomy: float = 0.7
    reserve: float = 0.1
    patience: float = 100.0
    price_window_s: float = 30.0
    price_fill: float = 1.05
    prefill_share: float = 0.35
    recent_s: float = 10.0  # how far back the forecast of prompts looks
    longest_prompt_s: float = 0.2  # as which one counts in it at most
    spare_seats: float = 0.125  # of all, which requests without objectives leave free
    rest_share: float = 0.1  # of the time for prompts, for those without objectives that come before the others
    longest_step: float = LONGEST_STEP  # times the smallest TPOT objective
    gap_limit: float = 4.0  # times the request's TPOT objective, between two tokens
    smallest_chunk: int = 16
    catch_up: float = 32.0  # steps in which requests that are behind should be in time again
    unsteady: float = 1.1  # how much longer than planned a step may be, where a first token is due at its end
    guard_steps: float = 6.0
    guard_chunk: int = 256
    ageing_s: float = 10.0  # stands for a TTFT objective
    idle_limit_s: float = 1.0  # of requests that take what is left
    priority_s: float = 1.0  # per level
    priority_price: float = 1.1  # per level, times the price: ten levels, 2.6 times
    priority_levels: int = 10  # up and down, beyond which a priority buys no more
    hint_factor: float = 2.0  # times the length that a client said, and so many tokens: how far it is believed
    hint_tokens: int = 32
    fairness_s: float = 1.0  # for a tenant that has twice its share
    refresh_s: float = 0.1
    looked_at: int = 16
