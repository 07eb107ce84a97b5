"""Budget of tokens that the proposers of a scheduler index in a step: long texts must not delay other requests."""

# Tokens of all requests that a step indexes, which takes a core about 1 ms.
MAX_INDEXED_TOKENS = 2048


class IndexBudget:
    """Tokens that may be indexed in the present step. All requests share them."""

    def __init__(self) -> None:
        self._left = MAX_INDEXED_TOKENS

    def begin_step(self) -> None:
        self._left = MAX_INDEXED_TOKENS

    def take(self, wanted: int, least: int = 0) -> int:
        """Take up to `wanted` tokens and return how many. `least`: so many are granted in any case."""
        granted = min(wanted, max(least, self._left // 2))  # half: one long text leaves some to others
        self._left = max(0, self._left - granted)
        return granted
