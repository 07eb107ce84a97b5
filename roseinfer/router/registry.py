"""Routing policies by name."""

from random import Random

from roseinfer.router.base import RoutingPolicy, RoutingPolicyFactory
from roseinfer.router.least import LeastLoaded
from roseinfer.router.pace import PaceRouting
from roseinfer.router.prefix_hash import PrefixHash
from roseinfer.router.round_robin import RoundRobin

_POLICIES: dict[str, RoutingPolicyFactory] = {
    "pace": PaceRouting,
    "least": LeastLoaded,
    "round-robin": RoundRobin,
    "prefix-hash": PrefixHash,
}
ROUTERS = tuple(_POLICIES)
# Policies that read `RoutingRequest.keys`; for others the keys need not be computed.
PREFIX_AWARE = frozenset({"pace", "prefix-hash"})


def make_routing_policy(name: str, rng: Random) -> RoutingPolicy:
    """Return the policy that the option `router` names. Raise KeyError for an unknown name."""
    return _POLICIES[name](rng)
