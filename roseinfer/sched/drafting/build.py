"""Construction of drafting from options."""

from collections.abc import Iterator
from dataclasses import replace

from roseinfer.core.config.speculation import (
    EagleValues,
    MethodValues,
    NgramValues,
    RecordedValues,
    RecordValues,
    SuffixValues,
)
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.head import HeadProposer
from roseinfer.sched.drafting.pricing import Pricing
from roseinfer.sched.drafting.proposer import Proposer
from roseinfer.sched.drafting.proposers.ngram import NgramProposer
from roseinfer.sched.drafting.proposers.own_tokens import OwnTokens
from roseinfer.sched.drafting.proposers.prediction import PredictionProposer
from roseinfer.sched.drafting.proposers.recorded import OutputRecorder, RecordedProposer
from roseinfer.sched.drafting.proposers.suffix import SuffixProposer


def make_drafting(
    values: MethodValues, pricing: Pricing, *, vocab_size: int = 0, share_outputs: bool = True
) -> Drafting:
    """Return drafting by the chosen method. `share_outputs`: outputs of a request may help to guess those of others.

    Raise `ConfigError` for a file that cannot be used.
    """
    if isinstance(values, SuffixValues) and not share_outputs:
        values = replace(values, corpus=0)
    if isinstance(values, EagleValues):
        head = HeadProposer(values.tokens)
        return Drafting((PredictionProposer(), head), pricing, values.tokens, head)
    return Drafting(tuple(_proposers(values, vocab_size)), pricing, values.tokens)


def _proposers(values: MethodValues, vocab_size: int) -> Iterator[Proposer]:
    own = OwnTokens()
    if isinstance(values, NgramValues | SuffixValues):
        yield PredictionProposer()
    if isinstance(values, NgramValues):
        yield NgramProposer(own, values.min, values.max)
    if isinstance(values, SuffixValues):
        yield SuffixProposer(own, values)
    if isinstance(values, RecordValues):
        yield OutputRecorder(values.path)
    if isinstance(values, RecordedValues):
        yield RecordedProposer(values, vocab_size)
