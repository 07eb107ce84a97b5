"""Proposer: interface to guess a request's next tokens."""

from typing import NamedTuple, Protocol

from roseinfer.core.request import Request

FORCED = "forced"  # name in metrics of tokens that a guide forces


class Proposal(NamedTuple):
    """Guesses of consecutive tokens. `proposer`: its name in metrics.

    `chances[i]`: the proposer's estimate that guess i is right if those before it are. Empty: it has no estimate.
    `forced`: how many of the first ones are not the proposer's, but what a guide forces.
    """

    proposer: str
    token_ids: tuple[int, ...]
    chances: tuple[float, ...] = ()
    forced: int = 0

    def after(self, forced: tuple[int, ...], count: int) -> "Proposal":
        """Return the first `count` tokens of `forced` and these guesses."""
        chances = self.chances and ((1.0,) * len(forced) + self.chances)[:count]
        return Proposal(self.proposer, (forced + self.token_ids)[:count], chances, len(forced))


class Proposer(Protocol):
    """Source of guesses of next tokens. Wrong ones cost time only: the output is the same without them."""

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        """Return 1 to `limit` guesses of the tokens that follow `request.tokens` and `after`; None = no guess.

        Token ids must be in the vocabulary. `after`: tokens that are guessed already.
        """
        ...

    def ended(self, request: Request) -> None:
        """Forget a request. Its tokens may help to guess those of others with the same `request.meta.prefix_scope`."""
        ...
