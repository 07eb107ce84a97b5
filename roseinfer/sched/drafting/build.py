"""Construction of drafting from options."""

from collections.abc import Iterator

from roseinfer.core.config.speculation import MethodValues, NgramValues
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.pricing import Pricing
from roseinfer.sched.drafting.proposer import Proposer
from roseinfer.sched.drafting.proposers.ngram import NgramProposer
from roseinfer.sched.drafting.proposers.own_tokens import OwnTokens


def make_drafting(values: MethodValues, pricing: Pricing) -> Drafting:
    """Return drafting by the chosen method."""
    return Drafting(tuple(_proposers(values)), pricing, values.tokens)


def _proposers(values: MethodValues) -> Iterator[Proposer]:
    own = OwnTokens()
    if isinstance(values, NgramValues):
        yield NgramProposer(own, values.min, values.max)
