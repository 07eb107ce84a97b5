"""Pooling: from the hidden states of a step's positions to the vectors of the requests that end in it."""

from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from roseinfer.core.plan import Row, RowResult
from roseinfer.core.pooling import FLOAT_BYTES, PoolingMethod
from roseinfer.runner.device import start_download, upload
from roseinfer.runner.seats import SeatTable


class PoolingHead(Protocol):
    """Last part of a model, which makes vectors of hidden states. `width`: numbers of a vector."""

    width: int

    def states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states to pool, [L, H], of the model's result `hidden` [L, H]."""
        ...

    def vectors(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return vectors [n, width] float32 of pooled states [n, H]."""
        ...


class PooledRows(NamedTuple):
    """Rows of a step, in the order of their hidden states. `lengths`: positions of each row among these states.

    `order`: index of each row in the plan. `complete`: the row is the last one of its request.
    """

    order: list[int]
    seats: list[int]
    starts: list[int]
    lengths: list[int]
    ends: list[int]
    complete: list[bool]

    @classmethod
    def of(cls, rows: list[Row], order: list[int]) -> "PooledRows":
        chosen = [rows[i] for i in order]
        return cls(
            order,
            [row.seat for row in chosen],
            [row.start for row in chosen],
            [row.logits for row in chosen],
            [row.start + row.count for row in chosen],
            [row.sample for row in chosen],
        )

    @property
    def ending(self) -> list[int]:
        """Places of the rows that end their requests."""
        return [place for place, complete in enumerate(self.complete) if complete]


class StepVectors(NamedTuple):
    """Vectors [n, width] float32 of the plan's rows `indices`. `widths`: numbers that each keeps."""

    vectors: torch.Tensor
    indices: list[int]
    widths: list[int]

    def download(self) -> "StepVectors":
        """Queue the copy to the host."""
        return self._replace(vectors=start_download(self.vectors))

    def finite(self) -> list[bool]:
        """Return for each row whether all of its numbers are finite; after the download."""
        # By NumPy: torch would spread this over threads, which takes longer than the work.
        found: list[bool] = np.isfinite(self.vectors.numpy()).all(axis=1).tolist()
        return found

    def results(self, rows: list[Row]) -> list[RowResult]:
        """Return the results of the plan's `rows`; after the download."""
        found: list[bytes | None] = [None] * len(rows)
        if self.indices:
            stride = FLOAT_BYTES * self.vectors.shape[1]
            data = memoryview(self.vectors.numpy().tobytes())
            for place, (index, width) in enumerate(zip(self.indices, self.widths, strict=True)):
                found[index] = bytes(data[place * stride : place * stride + FLOAT_BYTES * width])
        return [RowResult(row.request_id, vector=vector) for row, vector in zip(rows, found, strict=True)]


class Pooler:
    """Pooling of the requests of a seat table.

    A mean is the sum over a request's rows so far, in float32 and in a fixed order, so chunks and batches change no
    more than its last digit. `normalized`: vectors of fewer dimensions are normalised again.
    """

    def __init__(
        self,
        method: PoolingMethod,
        head: PoolingHead,
        seats: SeatTable,
        width: int,
        *,
        normalized: bool,
    ) -> None:
        """`width`: that of the states to pool."""
        self._method = method
        self._head = head
        self._normalized = normalized
        self._seats = seats
        rows = len(seats.seats) if method.needs_every_position else 0
        self._held = torch.zeros((rows, width), device=seats.device)

    def pool(self, hidden: torch.Tensor, rows: PooledRows) -> StepVectors:
        """Return the vectors of the requests that end with these rows. hidden: [L, H], L = sum of their lengths."""
        ending = rows.ending
        states = self._head.states(hidden) if len(hidden) else hidden
        if self._method.needs_every_position:
            pooled = self._hold(states, rows, ending)
        else:
            pooled = self._last(states, rows, ending)
        widths = [self._width(rows.seats[place]) for place in ending]
        vectors = self._head.vectors(pooled) if ending else hidden.new_empty((0, self._head.width)).float()
        return StepVectors(self._cut(vectors, widths), [rows.order[place] for place in ending], widths)

    def _width(self, seat: int) -> int:
        """Return how many numbers the request in a seat wants."""
        pooling = self._seats.at(seat).pooling
        return (pooling.dimensions if pooling is not None else None) or self._head.width

    def _last(self, states: torch.Tensor, rows: PooledRows, ending: list[int]) -> torch.Tensor:
        if len(states) == len(ending):
            return states
        ends = list(accumulate(rows.lengths))
        return states.index_select(0, upload([ends[place] - 1 for place in ending], torch.int64, states.device))

    def _hold(self, states: torch.Tensor, rows: PooledRows, ending: list[int]) -> torch.Tensor:
        """Add the rows' states to those of their requests. Return what the ending ones have pooled."""
        device = states.device
        ends = list(accumulate(rows.lengths))
        firsts = [end - length for end, length in zip(ends, rows.lengths, strict=True)]
        layout = (rows.seats, rows.starts, rows.lengths, firsts, rows.ends)
        seats, starts, lengths, first, end = upload(layout, torch.int64, device)
        began = (starts == 0)[:, None]
        if self._method is PoolingMethod.CLS:
            held = torch.where(began, states.index_select(0, first).float(), self._held.index_select(0, seats))
        else:
            sums = torch.segment_reduce(states.float(), "sum", lengths=lengths, axis=0)
            held = torch.where(began, sums, sums + self._held.index_select(0, seats))
        self._held.index_copy_(0, seats, held)
        if self._method is PoolingMethod.MEAN:
            held = held / end[:, None]
        return held if len(ending) == len(rows.seats) else held.index_select(0, upload(ending, torch.int64, device))

    def _cut(self, vectors: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """Zero the numbers beyond `widths`, and normalise the rest if the model does."""
        if all(width == vectors.shape[1] for width in widths):
            return vectors
        kept = upload(widths, torch.int64, vectors.device)[:, None]
        cut = vectors.masked_fill(torch.arange(vectors.shape[1], device=vectors.device) >= kept, 0.0)
        return F.normalize(cut, dim=1) if self._normalized else cut
