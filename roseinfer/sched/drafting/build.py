"""Construction of drafting from options."""

from collections.abc import Iterator
from dataclasses import replace

from roseinfer.core.config.speculation import (
    HeadValues,
    MethodValues,
    MtpValues,
    NgramValues,
    RecordedValues,
    RecordValues,
    SuffixValues,
)
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.head import EAGLE, MTP, HeadProposer
from roseinfer.sched.drafting.pricing import Pricing
from roseinfer.sched.drafting.proposer import Proposer
from roseinfer.sched.drafting.proposers.index_budget import IndexBudget
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
    budget = IndexBudget()
    if isinstance(values, HeadValues):
        head = HeadProposer(values.tokens, MTP if isinstance(values, MtpValues) else EAGLE)
        proposers = (PredictionProposer(budget), head)
        return Drafting(proposers, pricing, values.tokens, head, index_budget=budget)
    return Drafting(tuple(_proposers(values, vocab_size, budget)), pricing, values.tokens, index_budget=budget)


def _proposers(values: MethodValues, vocab_size: int, budget: IndexBudget) -> Iterator[Proposer]:
    own = OwnTokens(budget)
    if isinstance(values, NgramValues | SuffixValues):
        yield PredictionProposer(budget)
    if isinstance(values, NgramValues):
        yield NgramProposer(own, values.min, values.max)
    if isinstance(values, SuffixValues):
        yield SuffixProposer(own, values)
    if isinstance(values, RecordValues):
        yield OutputRecorder(values.path)
    if isinstance(values, RecordedValues):
        yield RecordedProposer(values, vocab_size)
