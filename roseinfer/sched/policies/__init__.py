"""One file per scheduling policy."""

from collections.abc import Callable
from dataclasses import dataclass, field

from roseinfer.core.config import SchedulerConfig
from roseinfer.sched.cost import CostModel, CostParams
from roseinfer.sched.cost_file import read_cost
from roseinfer.sched.lengths import make_lengths
from roseinfer.sched.lengths.base import LengthEstimator
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.policies.pack import PackPolicy
from roseinfer.sched.policies.qoserve import QoServePolicy
from roseinfer.sched.policies.sarathi import SarathiPolicy
from roseinfer.sched.policies.scorpio import ScorpioPolicy
from roseinfer.sched.policies.slack.policy import SlackPolicy
from roseinfer.sched.policy import Policy

FAST = CostParams(step_s=1e-3, token_s=5e-6, pair_s=0.0, row_s=5e-6, context_s=1e-9)


@dataclass(slots=True)
class Estimates:
    """What policies with objectives know: what steps cost, and how long outputs will be. Both learn as they go.

    The first guess of the cost is a fast machine's, and given up at the first steps: a policy turns nobody away for it.
    """

    cost: CostModel = field(default_factory=lambda: CostModel(FAST, trust=1.0))
    lengths: LengthEstimator = field(default_factory=lambda: make_lengths("classifier"))

    @classmethod
    def of(cls, config: SchedulerConfig) -> "Estimates":
        """Those that the options ask for. Raises `ConfigError` for a `cost_model` that is none."""
        lengths = make_lengths(config.length_estimator)
        if config.cost_model is None:
            return cls(lengths=lengths)
        return cls(CostModel(read_cost(config.cost_model)), lengths)


_POLICIES: dict[str, Callable[[SchedulerConfig, Estimates], Policy]] = {
    "fifo": lambda config, known: FifoPolicy(config),
    "pack": lambda config, known: PackPolicy(config),
    "sarathi": lambda config, known: SarathiPolicy(config),
    "qoserve": lambda config, known: QoServePolicy(config, known.cost),
    "scorpio": lambda config, known: ScorpioPolicy(config, known.cost, known.lengths),
    "slack": lambda config, known: SlackPolicy(config, known.cost, known.lengths),
}


def make_policy(config: SchedulerConfig, estimates: Estimates | None = None) -> Policy:
    """The policy that the options name. `estimates` instead of those that they ask for."""
    return _POLICIES[config.policy_name](config, estimates or Estimates.of(config))
