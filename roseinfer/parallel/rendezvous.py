"""Where the processes that share a model find each other."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """`store`: path of a file that is not there before the first of `size` processes comes; this one is number `rank`.

    A file serves one group, once. From then on the processes talk over this machine's loopback.
    """

    store: str
    rank: int
    size: int
