"""Properties of a scheduling policy that the server needs without importing the policy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """`sheds`: the policy may reject a waiting request, so an answer must not begin before its first token.

    `priorities`: the policy uses request priorities; other policies refuse requests that set one.
    """

    name: str
    sheds: bool = False
    priorities: bool = False
