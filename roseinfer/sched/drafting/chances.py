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
_UNTRIED_GAIN_SHARE = 1 / 64  # of the chance of the depth before, for each chain that ends earlier
_MIN_CHANCE_SHARE = 1e-6


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


class DepthChances:
    """Mean chances of a head's drafts by their depth in a chain, before they are made.

    A depth is learnt from all drafts that were made there, whether they were verified or not. One that is no longer
    made is soon believed as good as the one before, so that it is tried again. `gain_share`: weight of a new chain,
    once there are many.
    """

    __slots__ = ("_chains", "_gain_share", "shares")

    def __init__(self, gain_share: float, shares: Sequence[float] = ()) -> None:
        self._gain_share = gain_share
        self._chains = 0
        self.shares = list(shares)  # by depth, of a draft after right ones

    def add(self, products: Sequence[float]) -> None:
        """Learn from a chain's drafts: chances that each and all before it are right."""
        shares, before = self.shares, 1.0
        self._chains += 1
        gain_share = max(self._gain_share, 1 / (1 + self._chains))
        for depth, product in enumerate(products):
            if depth == len(shares):
                shares.append(shares[-1] if shares else DEFAULT_CHANCE_SHARE)
            shares[depth] += gain_share * (product / max(before, _MIN_CHANCE_SHARE) - shares[depth])
            before = product
        if 0 < len(products) < len(shares):
            next_depth = len(products)
            shares[next_depth] += _UNTRIED_GAIN_SHARE * (shares[next_depth - 1] - shares[next_depth])

    def products(self, count: int) -> Iterator[float]:
        """Yield the chances of the first `count` depths. Depths that were never made are as good as the last one."""
        product = 1.0
        for depth in range(count):
            product *= share_at(self.shares, depth)
            yield product


def share_at(shares: Sequence[float], depth: int) -> float:
    """Return the chance of a head's draft after right ones. depth: counted from 0; unknown ones are as the last."""
    if depth < len(shares):
        return shares[depth]
    return shares[-1] if shares else DEFAULT_CHANCE_SHARE


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
