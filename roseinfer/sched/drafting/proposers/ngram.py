"""n-gram proposer: what followed the last tokens earlier in the same request."""

from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal
from roseinfer.sched.drafting.proposers.matches import following, last_tokens, match_chance, match_length
from roseinfer.sched.drafting.proposers.own_tokens import OwnTokens

NAME = "ngram"


class NgramProposer:
    """Proposer of what followed the longest match of the last tokens, the latest of equal ones.

    `min_match`: tokens that must be equal, at least 2. `max_match`: up to this length a longer match is better.
    """

    def __init__(self, own: OwnTokens, min_match: int = 2, max_match: int = 4) -> None:
        self._own = own
        self._min_match = min_match
        self._max_match = max_match

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        tokens = request.tokens
        suffix = last_tokens(tokens, after)
        best, length = 0, self._min_match - 1
        for place in self._own.places(request, suffix):
            found = min(match_length(tokens, place, suffix), self._max_match)
            if found > length:
                best, length = place, found
                if length == self._max_match:
                    break
        if not best:
            return None
        guesses = following(tokens, best, after, limit)
        return Proposal(NAME, tuple(guesses), tuple(match_chance(length + i) for i in range(limit)))

    def ended(self, request: Request) -> None:
        self._own.ended(request)
