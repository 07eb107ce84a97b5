"""Interface of the guides of requests with constrained outputs, as far as drafting needs them."""

from collections.abc import Sequence
from typing import Protocol


class Constraints(Protocol):
    """Guides of an engine's sequences, as of their known tokens. Nothing here changes them."""

    def forced(self, sequence_id: str, limit: int) -> tuple[int, ...]:
        """Return up to `limit` next tokens that the guide leaves no choice about; () without a guide.

        A token that completes the output is left out: the row samples it in any case.
        """
        ...

    def legal(self, sequence_id: str, drafts: Sequence[int]) -> int:
        """Return how many of the leading `drafts` the guide allows and continues after; all of them without a guide.

        There may be fewer. 0 = the guide is too slow for drafts now.
        """
        ...
