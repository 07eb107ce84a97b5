"""The ways of choosing an engine that there are, by name."""

from random import Random

from roseinfer.router.base import MakeRouting, Routing
from roseinfer.router.least import Least
from roseinfer.router.pace import Pace
from roseinfer.router.prefix_hash import PrefixHash
from roseinfer.router.round_robin import RoundRobin

_KINDS: dict[str, MakeRouting] = {"pace": Pace, "least": Least, "round-robin": RoundRobin, "prefix-hash": PrefixHash}
ROUTERS = tuple(_KINDS)
# Those that look at `Ask.keys`: for the others nobody needs to compute them.
KEYED = frozenset({"pace", "prefix-hash"})


def make_routing(name: str, rng: Random) -> Routing:
    """The one that the option `router` names; a name that is not there is a KeyError."""
    return _KINDS[name](rng)
