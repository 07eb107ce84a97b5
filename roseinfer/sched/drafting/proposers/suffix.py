"""Suffix proposer: what usually followed the last tokens, in the same request and in finished outputs.

After SuffixDecoding (arXiv 2411.04975): follow the longest match while the product of empirical chances is high enough.
Its suffix trees are replaced by places of n-grams, at most a few of which are compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from roseinfer.core.config.speculation import MAX_DRAFTS, SuffixValues
from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.sched.drafting.proposers.corpus import MATCH_TOKENS, NO_TOKEN, Corpus
from roseinfer.sched.drafting.proposers.matches import following, last_tokens, match_chance, match_length
from roseinfer.sched.drafting.proposers.own_tokens import OwnTokens

NAME = "suffix"
# A match of this length says more than several shorter ones.
SURE_MATCH_TOKENS = 8


class _Guesses(NamedTuple):
    """Guesses that several matches agree on. `expected`: how many are probably right."""

    token_ids: list[int]
    chances: list[float]
    expected: float


class SuffixProposer:
    """Proposer of the most frequent continuation of the matches. `values`: limits, and the size of the corpus."""

    def __init__(self, own: OwnTokens, values: SuffixValues) -> None:
        self._own = own
        self._corpus = Corpus(values.corpus)
        self._factor = values.factor
        self._chance = values.chance

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        tokens = request.tokens
        suffix = last_tokens(tokens, after)
        places: list[tuple[Sequence[int], int]] = [(tokens, place) for place in self._own.places(request, suffix)]
        places += self._corpus.find(request.meta.prefix_scope, suffix)
        matches = [(match_length(source, place, suffix), source, place) for source, place in places]
        if not matches:
            return None
        longest = max(length for length, _, _ in matches)
        shortest = min(length for length, _, _ in matches)
        most = min(limit, max(1, int(self._factor * longest)))

        def agreed(least: int) -> _Guesses:
            found = [
                following(source, place, after, most) if source is tokens else _up_to_end(source, place, most)
                for length, source, place in matches
                if length >= least
            ]
            return self._agreed(found, least)

        best = agreed(longest)
        if shortest < longest < SURE_MATCH_TOKENS:
            best = max(best, agreed(shortest), key=_expected)
        return Proposal(NAME, tuple(best.token_ids), tuple(best.chances)) if best.token_ids else None

    def _agreed(self, continuations: list[list[int]], length: int) -> _Guesses:
        """Follow the most frequent token of the continuations of matches of `length` tokens, the first of equal ones.

        One of the places where a token followed counts for as much as the length of the match says. The others are
        counted.
        """
        guesses: list[int] = []
        chances: list[float] = []
        product, expected = 1.0, 0.0
        for index in range(MAX_DRAFTS):
            nexts = [found[index] for found in continuations if len(found) > index]
            if not nexts:
                break
            token = nexts[0] if len(nexts) == 1 else max(nexts, key=nexts.count)
            chance = (nexts.count(token) - 1 + match_chance(length + index)) / len(nexts)
            product *= chance
            if product < self._chance:
                break
            guesses.append(token)
            chances.append(chance)
            expected += product
            if len(continuations) > 1:
                continuations = [found for found in continuations if len(found) > index and found[index] == token]
        return _Guesses(guesses, chances, expected)

    def ended(self, request: Request) -> None:
        """Forget a request, and learn from its output and the last tokens before it."""
        self._own.ended(request)
        if request.num_outputs:
            self._corpus.add(request.meta.prefix_scope, request.tokens[max(0, request.prompt_len - MATCH_TOKENS) :])


def _expected(guesses: _Guesses) -> float:
    return guesses.expected


def _up_to_end(output: Sequence[int], place: int, count: int) -> list[int]:
    found = list(output[place : place + count])
    return found[: found.index(NO_TOKEN)] if NO_TOKEN in found else found
