"""RankGroup of the processes that share a model, and each rank's share of the weights.

Every rank computes the same tokens with its share of the heads, of the feed-forward width and of the vocabulary, as in
Megatron-LM (Shoeybi et al., 2019). A layer with split outputs is followed by one with split inputs, whose partial
results are summed over the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from roseinfer.core.errors import ConfigError

# Returns a rank's partial result for rows, plus a residual.
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


class RankGroup(Protocol):
    """`size` processes, of which this one is number `rank`. All of them call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def adds_residual(self, x: torch.Tensor) -> bool:
        """Return True if `all_reduce` of a tensor like x is the best place to add a residual. All ranks agree."""
        ...

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of all ranks' x, plus a residual of the same shape that every rank holds.

        All ranks get the same bits. The result may overwrite x or the residual.
        """
        ...

    def sum_products(self, product: Product, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' product(x), plus a residual that every rank holds and that may be overwritten.

        product: of rows, which may be computed in pieces.
        """
        ...

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [n, width] of all ranks side by side: [n, size * width] on every rank.

        out: where to write the result. Its rows need not be contiguous.
        """
        ...


class LiveGroup(RankGroup, Protocol):
    """A group with connections, which must be closed."""

    def minimum(self, value: int) -> int:
        """Return the minimum of the ranks' values. The timeout is long: for use while ranks start."""
        ...

    def ready(self) -> None:
        """Wait until all ranks have started. Timeouts are short from now on."""
        ...

    def check(self) -> None:
        """Raise if a rank has missed an exchange so far, whose results are invalid."""
        ...

    def abort(self) -> None:
        """Abort waits for other ranks if possible. Called from another thread."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """RankGroup of one process, with nothing to split or exchange."""

    rank: int = 0
    size: int = 1

    def adds_residual(self, x: torch.Tensor) -> bool:
        return False

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return x if residual is None else x + residual

    def sum_products(self, product: Product, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return sum_whole(self, product, x, residual)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x if out is None else out.copy_(x)

    def minimum(self, value: int) -> int:
        return value

    def ready(self) -> None:
        pass

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def partial_residual(group: RankGroup, residual: torch.Tensor | None) -> torch.Tensor | None:
    """Return the residual that this rank adds to its partial result, None if none.

    It is None where the sum over ranks adds the residual. Otherwise rank 0 adds it, as part of its product.
    """
    return None if residual is None or group.rank > 0 or group.adds_residual(residual) else residual


def sum_partials(group: RankGroup, partial: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return a layer's result: the sum of all ranks' partial results, which include `partial_residual`."""
    if residual is None or not group.adds_residual(residual):
        return group.all_reduce(partial)
    return group.all_reduce(partial, residual)


def sum_whole(group: RankGroup, product: Product, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of all ranks' product(x), plus a residual, by an exchange after the product."""
    return sum_partials(group, product(x, partial_residual(group, residual)), residual)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's slice of a dimension of size `whole`: `width` entries from `start` on."""

    start: int
    width: int
    whole: int

    @property
    def is_all(self) -> bool:
        return self.width == self.whole


def share_of(group: RankGroup, whole: int, *, unit: int = 1, repeat: bool = False) -> Share:
    """Return this rank's share of `whole`, a multiple of `unit` (a head's dimensions, a block of scales).

    repeat: with more ranks than units, neighbouring ranks hold the same unit, as for grouped KV heads.
    Raises `ConfigError` if the units cannot be split evenly.
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
