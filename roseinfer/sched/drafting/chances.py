"""Chances of drafts: how probable it is that a guess is right, learnt from those that were verified."""

from collections.abc import Iterator, Sequence
from itertools import islice

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
_MAX_KNOWN_COUNT = 1024  # kinds of proposals, between two guesses that are added


GuessKey = tuple[str, int, int]  # proposer, position and bin of its estimate


class ChanceTable:
    """Shares of right guesses by proposer, position and the proposer's estimate.

    A guess counts only if those before it were right. The share begins with the estimate.
    """

    def __init__(self) -> None:
        self._cells: dict[GuessKey, list[float]] = {}  # verified and right guesses, decayed
        self._shares: dict[tuple[str, int, int, tuple[float, ...]], Sequence[float]] = {}  # since a guess was added

    def shares(self, proposal: Proposal) -> Sequence[float]:
        """Return for each guess of a proposal the share of similar ones that were right."""
        alike = (proposal.proposer, proposal.forced, len(proposal.token_ids), proposal.chances)
        found = self._shares.get(alike)
        if found is None:
            if len(self._shares) >= _MAX_KNOWN_COUNT:
                self._shares.clear()
            found = self._shares[alike] = [
                _share(estimate, *self._cells.get(key, (0.0, 0.0))) for key, estimate in _keys(proposal)
            ]
        return found

    def add(self, key: GuessKey, estimate: float | None, right: bool) -> float:
        """Add a guess that was verified. Return its share before."""
        self._shares.clear()
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = [0.0, 0.0]
        verified, found = cell
        cell[0] += 1 - _CELL_DECAY_SHARE * verified
        cell[1] += right - _CELL_DECAY_SHARE * found
        return _share(estimate, verified, found)


def _share(estimate: float | None, verified: float, right: float) -> float:
    prior = DEFAULT_CHANCE_SHARE if estimate is None else estimate
    return (_PRIOR_COUNT * prior + right) / (_PRIOR_COUNT + verified)


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


def _keys(proposal: Proposal) -> Iterator[tuple[GuessKey, float | None]]:
    """Yield the key and the estimate of each guess. Those that a guide forces are alike, wherever they are."""
    own: Sequence[float | None] = proposal.chances or (None,) * len(proposal.token_ids)
    proposer, forced = proposal.proposer, proposal.forced
    for position, estimate in enumerate(own):
        if position < forced:
            yield (FORCED, 0, _BINS_COUNT - 1), 1.0
        elif estimate is None:
            yield (proposer, position - forced, _NO_ESTIMATE_BIN), None
        else:
            yield (proposer, position - forced, min(_BINS_COUNT - 1, int(estimate * _BINS_COUNT))), estimate


def chances(table: ChanceTable, record: RequestChances | None, proposal: Proposal) -> list[float]:
    """Return for each guess the chance that it and all before it are right."""
    forced, factor, product, found = proposal.forced, 1.0 if record is None else record.factor, 1.0, []
    for position, share in enumerate(table.shares(proposal)):
        own = share if position < forced else factor * share
        product *= own if own < MAX_CHANCE_SHARE else MAX_CHANCE_SHARE  # faster than min()
        found.append(product)
    return found


def learn(table: ChanceTable, record: RequestChances, proposal: Proposal, drafted: int, accepted: int) -> None:
    """Add the verified guesses: the `accepted` first of `drafted` were right. Those after a wrong one show nothing."""
    for number, (key, estimate) in enumerate(islice(_keys(proposal), min(drafted, accepted + 1))):
        chance = table.add(key, estimate, number < accepted)
        if number >= proposal.forced:
            record.add(chance, number < accepted)
