"""Chances of drafts: how probable it is that a guess is right, learnt from those that were verified."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from roseinfer.sched.drafting.proposer import FORCED, Proposal

DEFAULT_CHANCE_SHARE = 0.5  # of a guess without an estimate, before any was verified
MAX_CHANCE_SHARE = 0.995
_BINS_COUNT = 8  # of estimates
_NO_ESTIMATE_BIN = _BINS_COUNT
_PRIOR_COUNT = 6.0  # guesses that the prior counts as
_CELL_DECAY_SHARE = 1 / 256  # of older guesses, for each new one
_REQUEST_PRIOR_COUNT = 3.0  # right guesses that a request's record begins with
_REQUEST_DECAY_SHARE = 1 / 24


class ChanceTable:
    """Shares of right guesses by proposer, position and the proposer's estimate.

    A guess counts only if those before it were right. The share begins with the estimate.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[str, int, int], list[float]] = {}  # verified and right guesses, decayed

    def chance(self, proposer: str, position: int, estimate: float | None) -> float:
        prior = DEFAULT_CHANCE_SHARE if estimate is None else estimate
        verified, right = self._cells.get(_key(proposer, position, estimate), (0.0, 0.0))
        return (_PRIOR_COUNT * prior + right) / (_PRIOR_COUNT + verified)

    def add(self, proposer: str, position: int, estimate: float | None, right: bool) -> None:
        cell = self._cells.setdefault(_key(proposer, position, estimate), [0.0, 0.0])
        cell[0] += 1 - _CELL_DECAY_SHARE * cell[0]
        cell[1] += right - _CELL_DECAY_SHARE * cell[1]


class RequestChances:
    """Record of one request's guesses by one proposer, compared with what the table expects of them."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = self._expected = 0.0

    @property
    def factor(self) -> float:
        """Right guesses of this request, relative to those of all."""
        return (_REQUEST_PRIOR_COUNT + self._right) / (_REQUEST_PRIOR_COUNT + self._expected)

    def add(self, chance: float, right: bool) -> None:
        self._right += right - _REQUEST_DECAY_SHARE * self._right
        self._expected += chance - _REQUEST_DECAY_SHARE * self._expected


class _Guess(NamedTuple):
    """Key of one guess in the table. `forced`: the guess is a guide's."""

    proposer: str
    position: int
    estimate: float | None
    forced: bool


def _guesses(proposal: Proposal) -> Iterator[_Guess]:
    """Yield the guesses of a proposal. Those that a guide forces are alike, wherever they are."""
    own: Sequence[float | None] = proposal.chances or (None,) * len(proposal.token_ids)
    for position, estimate in enumerate(own):
        if position < proposal.forced:
            yield _Guess(FORCED, 0, 1.0, True)
        else:
            yield _Guess(proposal.proposer, position - proposal.forced, estimate, False)


def chances(table: ChanceTable, record: RequestChances | None, proposal: Proposal) -> Iterator[float]:
    """Yield for each guess the chance that it and all before it are right."""
    product, factor = 1.0, 1.0 if record is None else record.factor
    for guess in _guesses(proposal):
        share = table.chance(guess.proposer, guess.position, guess.estimate)
        product *= min(MAX_CHANCE_SHARE, share if guess.forced else factor * share)
        yield product


def learn(table: ChanceTable, record: RequestChances, proposal: Proposal, drafted: int, accepted: int) -> None:
    """Add the verified guesses: the `accepted` first of `drafted` were right. Those after a wrong one show nothing."""
    for number, guess in enumerate(islice(_guesses(proposal), min(drafted, accepted + 1))):
        right = number < accepted
        if not guess.forced:
            record.add(table.chance(guess.proposer, guess.position, guess.estimate), right)
        table.add(guess.proposer, guess.position, guess.estimate, right)


def _key(proposer: str, position: int, estimate: float | None) -> tuple[str, int, int]:
    share = _NO_ESTIMATE_BIN if estimate is None else min(_BINS_COUNT - 1, int(estimate * _BINS_COUNT))
    return proposer, position, share
