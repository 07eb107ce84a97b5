"""Places of n-grams in the tokens of live requests. Several proposers share them."""

from collections.abc import Sequence

from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposers.places import NgramPlaces

# Tokens of one request that a call indexes: a long prompt must not delay the step that it is called in.
MAX_CATCH_UP_TOKENS = 2048


class OwnTokens:
    """Places in the prompt and output of each live request, kept up as the output grows."""

    def __init__(self) -> None:
        self._indexes: dict[str, tuple[NgramPlaces, ...]] = {}

    def places(self, request: Request, suffix: Sequence[int]) -> list[int]:
        """Return places in `request.tokens` behind the last 4 tokens of `suffix`, or else behind the last 2."""
        tokens = request.tokens
        indexes = self._indexes.get(request.request_id)
        if indexes is None:
            indexes = self._indexes[request.request_id] = (NgramPlaces(4), NgramPlaces(2))
        end = len(tokens)
        for index in indexes:
            if index.end < end:
                index.extend(tokens, min(end, index.end + MAX_CATCH_UP_TOKENS))
        for index in indexes:
            places = index.find(tokens, suffix)
            if places:
                return places
        return []

    def ended(self, request: Request) -> None:
        """Forget a request."""
        self._indexes.pop(request.request_id, None)
