"""Bursts: longer steps for a queue of prompts while no request has objectives.

Each step has a fixed cost, so a few long steps compute a queue of prompts faster than many short ones. But a request
that arrives meanwhile waits until the running step ends and, with two steps in flight, the next one. So steps grow only

* if no request with objectives is here or has been for `QUIET_S`;
* if enough prompt tokens can start to fill such a step;
* if fixed costs take `MIN_FIXED_SHARE` of an ordinary full step, and then until they take `MAX_FIXED_SHARE` or the step
  takes `MAX_STEP_S`;
* if an ordinary full step takes `MIN_FULL_STEP_S`. Longer ones are not captured in CUDA graphs, and with a small model
  the device would wait for their launches.
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

# A step is long enough when its fixed costs take no more than this share.
MAX_FIXED_SHARE = 0.1
# Below it longer steps gain too little, and the fit of fixed costs is too rough to tell: with Qwen3-8B on an H200,
# steps twice as long compute a burst 0.3% faster, and its tokens are 99 ms apart instead of 54.
MIN_FIXED_SHARE = 0.2
# The tokens of running requests are up to two such steps apart.
MAX_STEP_S = 0.12
MIN_FULL_STEP_S = 0.02
QUIET_S = 60.0
# Before the model has seen as many steps, its prediction for long ones is a guess.
_MIN_LEARNT_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class BurstOptions:
    """Options for a queue of prompts while no request has objectives."""

    slack_decode_share: float = option(
        0.35,
        "while no request has objectives and more prompts wait than fit into a step: the largest share of the time for "
        "decoding requests; 1 = they compute in every step",
    )
    slack_burst_tokens: int | None = option(
        None,
        "most tokens of a step while no request has objectives and more prompts wait than fit; default: "
        "--max-num-batched-tokens, and up to 8192 on a GPU with 64 GiB of memory or more",
    )

    def __post_init__(self) -> None:
        if not 0 < self.slack_decode_share <= 1:
            raise ConfigError(f"slack_decode_share must be above 0 and at most 1, got {self.slack_decode_share}")
        check_positive(self, "slack_burst_tokens")


class BurstBudget:
    """Token budget of each step, up to `SchedulerConfig.largest_step`."""

    def __init__(self, config: SchedulerConfig, options: PrefillOptions, cost: CostModel) -> None:
        self._config = config
        self._options = options
        self._cost = cost
        self._last_promised_s = -inf

    @classmethod
    def of(cls, config: SchedulerConfig, options: PrefillOptions, cost: CostModel) -> "BurstBudget | None":
        """Return a budget, or None if the config allows no longer steps."""
        return cls(config, options, cost) if config.largest_step > config.max_num_batched_tokens else None

    def widen(self, view: View, promised: bool) -> View:
        """Return the view with a larger token budget if the step is to be long.

        `promised`: a live request has objectives.
        """
        if promised:
            self._last_promised_s = view.now_s
        if not view.num_waiting or view.now_s < self._last_promised_s + QUIET_S or self._cost.steps < _MIN_LEARNT_STEPS:
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
        """Return the tokens of a step that is long enough, for prompts that take `token_s` seconds per token.

        0: no step should grow.
        """
        p = self._cost.params
        rows_s = p.decode_s([len(request.tokens) for request in view.running])
        fixed_s = p.step_s + p.experts_s(inf)
        full_s = fixed_s + rows_s + token_s * self._config.max_num_batched_tokens
        if full_s < MIN_FULL_STEP_S or fixed_s < MIN_FIXED_SHARE * full_s:
            return 0
        pays = (1 / MAX_FIXED_SHARE - 1) * fixed_s / token_s
        fits = (MAX_STEP_S - fixed_s - rows_s) / token_s
        return int(min(self._config.largest_step, pays, fits))
