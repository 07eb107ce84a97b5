"""Construction of drafting from options."""

from collections.abc import Iterator
from dataclasses import replace

from roseinfer.core.config.speculation import EagleValues, MethodValues, NgramValues, SuffixValues
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.head import HeadProposer
from roseinfer.sched.drafting.pricing import Pricing
from roseinfer.sched.drafting.proposer import Proposer
from roseinfer.sched.drafting.proposers.ngram import NgramProposer
from roseinfer.sched.drafting.proposers.own_tokens import OwnTokens
from roseinfer.sched.drafting.proposers.prediction import PredictionProposer
from roseinfer.sched.drafting.proposers.suffix import SuffixProposer


def make_drafting(values: MethodValues, pricing: Pricing, *, share_outputs: bool = True) -> Drafting:
    """Return drafting by the chosen method. `share_outputs`: outputs of a request may help to guess those of others."""
    if isinstance(values, SuffixValues) and not share_outputs:
        values = replace(values, corpus=0)
    if isinstance(values, EagleValues):
        head = HeadProposer(values.tokens)
        return Drafting((head,), pricing, values.tokens, head)
    return Drafting(tuple(_proposers(values)), pricing, values.tokens)


def _proposers(values: MethodValues) -> Iterator[Proposer]:
    own = OwnTokens()
    if isinstance(values, NgramValues | SuffixValues):
        yield PredictionProposer()
    if isinstance(values, NgramValues):
        yield NgramProposer(own, values.min, values.max)
    if isinstance(values, SuffixValues):
        yield SuffixProposer(own, values)
