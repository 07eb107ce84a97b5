"""Two-sided attention of packed rows, without a KV store.

On a GPU in half precision, one kernel of PyTorch computes all rows without padding. Elsewhere, rows of equal length are
attended together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.split_qkv import split_qkv
from roseinfer.models.encoders.base import PackedRows

# Queries that attend to a window at once. This bounds the mask, and the keys that are read in vain.
_SLICE_TOKENS = 256
# The widest heads of the kernel for packed rows, whose heads are also a multiple of 8 wide.
_MAX_HEAD_DIM = 256


class RowAttention:
    """Attention within each of a step's rows. All layers of the step share it."""

    def __init__(self, rows: PackedRows) -> None:
        self._rows = rows
        self._longest = max(rows.query_lens)
        self._groups: list[_EqualRows] | None = None
        self._bands: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, qkv: torch.Tensor, heads: HeadTransform, reach: int | None = None) -> torch.Tensor:
        """Apply `heads` to queries and keys, and attend.

        qkv: [T, (heads + 2 * kv_heads) * D], packed projections, query heads first; may be overwritten. reach: the
        query at position i sees the keys at positions j with |i - j| <= reach; None for all keys of its row. Returns
        [T, heads * D].
        """
        q, k, v = split_qkv(qkv, heads, self._rows.positions)
        if heads.spec.group > 1:  # not every version's kernel shares keys among heads
            k, v = (x.repeat_interleave(heads.spec.group, 1) for x in (k, v))
        if _fits_packed_kernel(q):
            start, longest = self._rows.query_start, self._longest
            window = (-1, -1) if reach is None else (reach, reach)
            kernel = _packed_kernel()
            assert kernel is not None
            out = kernel(q, k, v, start, start, longest, longest, scale=heads.spec.scale, window_size=window)
            return out.reshape(q.shape[0], -1)
        return self._by_length(q, k, v, heads.spec.scale, reach).reshape(q.shape[0], -1)

    def _by_length(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, reach: int | None
    ) -> torch.Tensor:
        if self._groups is None:
            self._groups = _equal_rows(self._rows)
        out = q.new_empty(q.shape)
        for group in self._groups:
            queries, keys, values = (group.batched(x) for x in (q, k, v))
            if reach is not None and reach < group.length - 1:
                attended = self._window(queries, keys, values, scale, reach)
            else:
                attended = scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[group.tokens] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def _window(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, reach: int) -> torch.Tensor:
        """Return the attention [R, heads, L, D] of rows longer than the window, a slice of queries at a time."""
        length = q.shape[2]
        out = []
        for first in range(0, length, _SLICE_TOKENS):
            last = min(first + _SLICE_TOKENS, length)
            seen = slice(max(0, first - reach), min(length, last + reach))
            mask = self._band(last - first, seen.stop - seen.start, first - seen.start, reach)
            keys, values = k[:, :, seen], v[:, :, seen]
            out.append(scaled_dot_product_attention(q[:, :, first:last], keys, values, attn_mask=mask, scale=scale))
        return torch.cat(out, 2)

    def _band(self, queries: int, keys: int, before: int, reach: int) -> torch.Tensor:
        """Return the mask [queries, keys]. before: keys before the one at the first query's position."""
        shape = (queries, keys, before, reach)
        if shape not in self._bands:
            device = self._rows.input_ids.device
            query = torch.arange(before, before + queries, device=device)
            self._bands[shape] = (query[:, None] - torch.arange(keys, device=device)).abs() <= reach
        return self._bands[shape]


@dataclass(frozen=True, slots=True)
class _EqualRows:
    """Rows of one length. `tokens` selects their packed tokens."""

    tokens: slice | torch.Tensor
    count: int
    length: int

    def batched(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows' part of x [T, heads, D] as [count, heads, length, D]."""
        return x[self.tokens].unflatten(0, (self.count, self.length)).transpose(1, 2)


def _equal_rows(rows: PackedRows) -> list[_EqualRows]:
    starts: dict[int, list[int]] = {}
    for start, length in zip(accumulate(rows.query_lens, initial=0), rows.query_lens, strict=False):
        starts.setdefault(length, []).append(start)
    return [_select(firsts, length, rows.input_ids.device) for length, firsts in starts.items()]


def _select(firsts: list[int], length: int, device: torch.device) -> _EqualRows:
    """Return the rows of `length` tokens that begin at `firsts`, in ascending order."""
    count = len(firsts)
    if firsts[-1] - firsts[0] == (count - 1) * length:  # neighbours: nothing is copied
        return _EqualRows(slice(firsts[0], firsts[-1] + length), count, length)
    index = torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
    return _EqualRows(index.flatten(), count, length)


def _fits_packed_kernel(q: torch.Tensor) -> bool:
    half = q.dtype in (torch.bfloat16, torch.float16)
    wide = q.shape[-1] > _MAX_HEAD_DIM or q.shape[-1] % 8
    return q.is_cuda and half and not wide and _packed_kernel() is not None


@cache
def _packed_kernel() -> Callable[..., Any] | None:
    """Return PyTorch's attention over packed rows; None if this version has none with windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in signature(varlen_attn).parameters else None
