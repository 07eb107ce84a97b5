"""Sums of large tensors over two GPUs in pieces of rows: one is exchanged while the product of the next is computed.

Copy engines bring pieces to the other GPU, so the multiprocessors stay with the products. A piece has one of two places
there. The ranks meet before the first piece, and after each: then both have received it, and have added the one before,
whose place is free again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from roseinfer.kernels.comm.all_reduce import DTYPES
from roseinfer.kernels.comm.peers import TURN_COUNT, Peers
from roseinfer.kernels.comm.pieces import add_piece, meet
from roseinfer.kernels.common.triton_support import cdiv

PIECE_RANK_COUNT = 2
# Smaller pieces hide more of an exchange, but their products are slower.
PIECE_BYTES = 20 << 20
_MIN_PIECES = 2
_MULTIPLE_ROWS = 128  # of a piece, as of the products' tiles

# Returns a part of the other rank's memory: elements of a dtype from an offset in bytes on.
View = Callable[[int, int, torch.dtype], torch.Tensor]


class PieceSums:
    """Sums whose exchange overlaps with products. Its calls are queued on the current stream, and may be captured."""

    def __init__(self, peers: Peers, view: View) -> None:
        """peers: two, whose layout has pieces of `PIECE_BYTES`."""
        self._peers, self._view = peers, view
        self._module: Any = torch.get_device_module(peers.bases.device)
        # Of higher priority than products, or a small kernel would wait until all programs of a product have begun.
        self._copying, self._adding = (self._module.Stream(priority=-1) for _ in range(2))

    def takes(self, x: torch.Tensor) -> bool:
        """Return True if x is too large for other kernels and `sum` supports it: the same answer on all ranks."""
        is_large = x.nbytes > self._peers.layout.limit
        return is_large and x.ndim == 2 and x.dtype in DTYPES and x.is_contiguous() and _most_rows(x) > 0

    def sum(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        product: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the sum of both ranks' x, plus a residual, in x's place or the residual's.

        product: of rows of x, instead of x itself; then there must be a residual, which `takes` supports.
        """
        out = x if residual is None else residual
        main = self._module.current_stream()
        self._adding.wait_stream(main)
        met = self._meet()
        parts = []  # which the other streams use
        for number, rows in enumerate(_pieces(out)):
            turn = number % TURN_COUNT
            parts.append(x[rows] if product is None else product(x[rows]))
            computed = main.record_event()
            with self._module.stream(self._copying):
                self._copying.wait_event(computed)
                self._copying.wait_event(met)
                self._place(turn, parts[-1]).copy_(parts[-1], non_blocking=True)
                copied = self._copying.record_event()
            self._adding.wait_event(copied)
            met = self._meet()
            with self._module.stream(self._adding):
                add_piece(parts[-1], None if residual is None else residual[rows], self._peers, turn)
        main.wait_stream(self._adding)
        return out

    def _meet(self) -> Any:
        with self._module.stream(self._adding):
            meet(self._peers)
            return self._adding.record_event()

    def _place(self, turn: int, part: torch.Tensor) -> torch.Tensor:
        layout = self._peers.layout
        return self._view(layout.pieces + turn * layout.piece_bytes, part.numel(), part.dtype).view(part.shape)


def _most_rows(x: torch.Tensor) -> int:
    return PIECE_BYTES // (x.shape[1] * x.itemsize) // _MULTIPLE_ROWS * _MULTIPLE_ROWS


def _pieces(x: torch.Tensor) -> Iterator[slice]:
    """Yield pieces of x's rows, which are equal but for the last."""
    count = max(_MIN_PIECES, cdiv(len(x), _most_rows(x)))
    step = cdiv(len(x), count * _MULTIPLE_ROWS) * _MULTIPLE_ROWS
    for start in range(0, len(x), step):
        yield slice(start, min(start + step, len(x)))
