"""The processes that share a model, as one of them sees the others, and which part of a weight is whose.

Every rank computes the same tokens with its share of the heads, of the feed-forward width and of the vocabulary, as in
Megatron-LM (Shoeybi et al., 2019): a layer whose outputs are split is followed by one whose inputs are, whose partial
results are summed over the ranks.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from roseinfer.core.errors import ConfigError


class Group(Protocol):
    """`size` processes, of which this one is number `rank`. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def adds_residual(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce` of a tensor like x is where a residual is best added; the same answer on all ranks."""
        ...

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all ranks' x, and of a residual of the same shape that every rank holds: the same bits on each.

        Either may be overwritten by it.
        """
        ...

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [n, width] of every rank -> [n, size * width] on every rank, side by side in the order of the ranks.

        It goes to `out` if that is given, whose rows may lie apart.
        """
        ...


class LiveGroup(Group, Protocol):
    """A group that somebody has made, and that ends."""

    def minimum(self, value: int) -> int:
        """The least of what the ranks say. Waits long for the others: for calls while they start."""
        ...

    def ready(self) -> None:
        """Wait for all ranks to have come this far. From now on each is soon where another waits for it."""
        ...

    def check(self) -> None:
        """Raise if a rank has not done its part of what was exchanged so far: its results are not to be used."""
        ...

    def abort(self) -> None:
        """To be called from another thread: whoever waits for other ranks gives up, as far as can be."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The group of one process: nothing is split, nothing is exchanged."""

    rank: int = 0
    size: int = 1

    def adds_residual(self, x: torch.Tensor) -> bool:
        return False

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return x if residual is None else x + residual

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x if out is None else out.copy_(x)

    def minimum(self, value: int) -> int:
        return value

    def ready(self) -> None:
        """There is no other rank."""

    def check(self) -> None:
        """There is no other rank."""

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""


def partial_residual(group: Group, residual: torch.Tensor | None) -> torch.Tensor | None:
    """What this rank's partial result starts from, of a layer that adds `residual` to the sum of all ranks' results.

    Nothing where the sum adds it; else one rank starts from it, so that its product may still do so.
    """
    return None if residual is None or group.rank > 0 or group.adds_residual(residual) else residual


def sum_partials(group: Group, partial: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The layer's result: the sum of all ranks' partial results, which began with `partial_residual`."""
    if residual is None or not group.adds_residual(residual):
        return group.all_reduce(partial)
    return group.all_reduce(partial, residual)


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank holds of something `whole` wide: `width` of it from `start` on."""

    start: int
    width: int
    whole: int

    @property
    def is_all(self) -> bool:
        return self.width == self.whole


def share_of(group: Group, whole: int, *, unit: int = 1, repeat: bool = False) -> Share:
    """This rank's share of `whole`, which is only cut between units (a head's dimensions, a block of scales).

    repeat: with more ranks than units, neighbouring ranks hold the same unit, as grouped KV heads do.
    Raises `ConfigError` if the units cannot be dealt out evenly.
    """
    units, rest = divmod(whole, unit)
    if rest == 0 and units % group.size == 0:
        width = units // group.size * unit
        return Share(group.rank * width, width, whole)
    if rest == 0 and repeat and group.size % units == 0:
        return Share(group.rank * units // group.size * unit, unit, whole)
    raise ConfigError(
        f"tensor_parallel_size: {whole} columns in units of {unit} cannot be split among {group.size} processes"
    )
