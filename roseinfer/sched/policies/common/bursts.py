"""Longer steps for a burst of prompts that nobody with objectives waits behind.

A step takes some time however many tokens it has, so few long steps compute a queue of prompts sooner than many short
ones. But whoever comes meanwhile waits until they end: the one that runs, and with two steps in flight the next one,
too. So steps grow only

* while nobody with objectives is here, nor has been for `QUIET_S`;
* while as many prompt tokens can start as such a step holds;
* as far as the cost model says that it pays, and up to `LONGEST_STEP_S`.
"""

from dataclasses import dataclass
from math import inf

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.policies.common.rotation import decodes, prompt_token_s
from roseinfer.sched.policy import View
from roseinfer.sched.prefill import PrefillBudget, PrefillOptions

# Of a step, what its fixed costs take at most once it is long enough.
FIXED_SHARE = 0.03
LONGEST_STEP_S = 0.2
QUIET_S = 60.0
# Steps that the model has seen, before which what it says of long ones is a guess.
_LEARNT = 50


@dataclass(frozen=True, kw_only=True)
class BurstOptions:
    """How a queue of prompts is computed that nobody with objectives waits behind."""

    slack_decode_share: float = option(
        0.1,
        "while nobody has objectives and more prompts wait than a step holds: the share of the time that requests "
        "which decode get at most; 1 = they compute in every step",
    )
    slack_burst_tokens: int | None = option(
        None,
        "tokens of one step while nobody has objectives and more prompts wait than that, as far as it pays; default: "
        "max_num_batched_tokens, and on a GPU with 64 GiB of memory or more up to 8192",
    )

    def __post_init__(self) -> None:
        if not 0 < self.slack_decode_share <= 1:
            raise ConfigError(f"slack_decode_share must be above 0 and at most 1, got {self.slack_decode_share}")
        check_positive(self, "slack_burst_tokens")


class BurstBudget:
    """How many tokens each step may have, up to `SchedulerConfig.largest_step`."""

    def __init__(self, config: SchedulerConfig, options: PrefillOptions, cost: CostModel) -> None:
        self._config = config
        self._options = options
        self._cost = cost
        self._owed_s = -inf

    @classmethod
    def of(cls, config: SchedulerConfig, options: PrefillOptions, cost: CostModel) -> "BurstBudget | None":
        """None if no step is to be longer than others."""
        return cls(config, options, cost) if config.largest_step > config.max_num_batched_tokens else None

    def widen(self, view: View, owed: bool) -> View:
        """The view of a step, with a larger budget if that is to be long. owed: somebody with objectives is here."""
        if owed:
            self._owed_s = view.now_s
        if not view.num_waiting or view.now_s < self._owed_s + QUIET_S or self._cost.steps < _LEARNT:
            return view
        filling = [request for request in view.running if request.remaining and not decodes(request)]
        if not filling and not view.waiting():
            return view
        tokens = self._tokens(view, prompt_token_s(self._cost, filling, view))
        if tokens <= view.token_budget:
            return view
        wide = view._replace(token_budget=tokens)
        wanted = PrefillBudget(self._config, self._options, wide).expected(sum(r.remaining for r in filling))
        return view if wanted < tokens else wide

    def _tokens(self, view: View, token_s: float) -> int:
        """What pays, of prompts that take so many seconds a token."""
        p = self._cost.params
        rows_s = p.row_s * len(view.running) + p.context_s * sum([len(request.tokens) for request in view.running])
        fixed_s = p.step_s + p.experts_s(inf)
        pays = (1 / FIXED_SHARE - 1) * fixed_s / token_s
        fits = (LONGEST_STEP_S - fixed_s - rows_s) / token_s
        return int(min(self._config.largest_step, pays, fits))
