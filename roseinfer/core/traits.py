"""What others have to know of a scheduling policy: the server, without importing it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyTraits:
    """`sheds`: the policy may turn a waiting request away, so an answer must not begin before its first token.
    `priorities`: it looks at a request's priority; under one that does not, a priority is refused.
    """

    name: str
    sheds: bool = False
    priorities: bool = False
