"""One file per scheduling policy."""

from collections.abc import Callable

from roseinfer.core.config import SchedulerConfig
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.policies.pack import PackPolicy
from roseinfer.sched.policy import Policy

_POLICIES: dict[str, Callable[[SchedulerConfig], Policy]] = {"fifo": FifoPolicy, "pack": PackPolicy}


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that the options name."""
    return _POLICIES[config.policy_name](config)
