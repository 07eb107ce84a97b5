"""Routing policies by name."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from roseinfer.router.base import RoutingRequest
from roseinfer.router.least import LeastLoaded
from roseinfer.router.pace import PaceRouting
from roseinfer.router.prefix_hash import PrefixHash
from roseinfer.router.round_robin import RoundRobin
from roseinfer.router.view import EngineView


class RoutingPolicy(Protocol):
    """Way to choose an engine. Each policy has a file and a name here."""

    def choose(self, request: RoutingRequest, candidates: Sequence[EngineView], now_s: float) -> tuple[EngineView, str]:
        """Return one of the candidates (at least one is given) and the reason."""
        ...


# The generator makes random choices.
_POLICIES: dict[str, Callable[[Random], RoutingPolicy]] = {
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
