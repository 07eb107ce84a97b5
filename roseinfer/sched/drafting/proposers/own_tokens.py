"""Places of n-grams in the tokens of live requests. Several proposers share them."""

from collections.abc import Sequence

from roseinfer.core.config.speculation import MAX_DRAFTS
from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposers.index_budget import IndexBudget
from roseinfer.sched.drafting.proposers.places import NgramPlaces

# Tokens of a request that each step indexes in any case: as many as it adds, so that long prompts of other requests do
# not keep the index from following the output.
MIN_INDEXED_TOKENS = MAX_DRAFTS + 1


class OwnTokens:
    """Places in the prompt and output of each live request, indexed as far as the budget of each step allows."""

    def __init__(self, budget: IndexBudget) -> None:
        self._budget = budget
        self._indexes: dict[str, tuple[NgramPlaces, ...]] = {}

    def places(self, request: Request, suffix: Sequence[int]) -> list[int]:
        """Return indexed places in `request.tokens` after the last 4 tokens of `suffix`, or else after the last 2."""
        tokens = request.tokens
        indexes = self._indexes.get(request.request_id)
        if indexes is None:
            indexes = self._indexes[request.request_id] = (NgramPlaces(4), NgramPlaces(2))
        end = indexes[-1].end
        if end < len(tokens):
            end += self._budget.take(len(tokens) - end, MIN_INDEXED_TOKENS)
            for index in indexes:
                index.extend(tokens, end)
        for index in indexes:
            places = index.find(tokens, suffix)
            if places:
                return places
        return []

    def ended(self, request: Request) -> None:
        """Forget a request."""
        self._indexes.pop(request.request_id, None)
