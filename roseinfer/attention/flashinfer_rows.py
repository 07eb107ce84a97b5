"""The rows of a batch that one call of FlashInfer takes: how it is planned, and what a layer then runs.

FlashInfer divides the work of a step among the multiprocessors on the host, in a `plan` that costs the host time in
every step and ends with a copy to the device; all layers share it. Nothing here waits for the device: lengths come from
the batch's host lists, block tables are turned into lists of blocks by a kernel of ours.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from roseinfer.attention.base import AttentionShape
from roseinfer.attention.batch import ForwardBatch
from roseinfer.kernels.page_list import PageList, list_pages
from roseinfer.kernels.triton_support import cdiv

PromptKernel = Literal["fa2", "fa3"]
KV = tuple[torch.Tensor, torch.Tensor]

# Query heads per KV head that the decoding kernel without matrix units is written for.
_SCALAR_GROUPS = (1, 2, 3, 4, 8)
# The least group that decodes on the matrix units.
_TENSOR_CORE_GROUP = 4
# Programs that a multiprocessor runs at once, on which FlashInfer bases its plans.
_PROGRAMS_PER_PROCESSOR = 2
# Bytes of a captured batch's plan: a few integers for each of its programs, of which there are some thousands at most.
_GRAPH_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's heads on a GPU of so many multiprocessors (`processors`), as FlashInfer's planning sees them.

    tensor_cores: rows of one query are computed on the matrix units, by the kernel for prompts.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    dtype: torch.dtype
    device: torch.device
    processors: int
    tensor_cores: bool

    @classmethod
    def of(cls, shape: AttentionShape) -> "Geometry":
        """shape: of a CUDA GPU, all layers of which are alike."""
        spec = shape.specs[0]
        group = spec.group
        return cls(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            shape.block_size,
            shape.dtype,
            shape.device,
            processors=torch.cuda.get_device_properties(shape.device).multi_processor_count,
            tensor_cores=group >= _TENSOR_CORE_GROUP or group not in _SCALAR_GROUPS,
        )

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def split_limit(self) -> int:
        """How many parts FlashAttention 2 cuts the rows of a batch into; a batch of more rows is not split at all."""
        return _PROGRAMS_PER_PROCESSOR * self.processors // self.kv_heads

    def query_tile(self, queries: int) -> int:
        """Queries, times the heads of a group, that a program of FlashAttention 2 takes, of a row of `queries`."""
        packed = queries * self.group
        if packed > 64 and self.head_dim < 256:
            return 128
        return 64 if packed > 16 else 16

    def scratch_bytes(self) -> int:
        """Room for the parts of split rows: float32 sums and a scale for each query and head of each part."""
        limit, tile = self.split_limit, self.query_tile(1)
        prompts = limit * self.query_tile(1 << 20)
        captured = max(limit, cdiv(limit * self.group, tile) + limit) * tile
        return self.heads * max(prompts, captured) * (self.head_dim + 1) * 4 + (1 << 20)

    def plan_arguments(self) -> dict[str, Any]:
        """What every plan of either kind is told besides the rows."""
        return {
            "num_qo_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "page_size": self.block_size,
            "sm_scale": self.scale,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }


class _Lengths:
    """Rows' contexts in blocks, on the host. starts: [R + 1], last_tokens: [R] int32, as in `PageList`."""

    def __init__(self, context_lens: Sequence[int], block_size: int) -> None:
        lens = np.array(context_lens, dtype=np.int32)
        counts = (lens + (block_size - 1)) // block_size
        self.starts = _starts(counts)
        self.last_tokens = torch.from_numpy(lens - (counts - 1) * block_size)
        self.longest = int(counts.max())
        self.total = int(self.starts[-1])


def _starts(counts: np.ndarray) -> torch.Tensor:
    """[n + 1] int32 on the host: 0 and the running sums of n counts."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return torch.from_numpy(starts)


class _PlanCopy(AbstractContextManager[None]):
    """Put around every plan of one wrapper, which writes to a page-locked buffer and starts a copy from there.

    The next plan overwrites the buffer, so it has to wait until that copy is done. Two steps later it always is.
    """

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()

    def __enter__(self) -> None:
        self._copied.synchronize()

    def __exit__(self, *_: object) -> None:
        self._copied.record()


class DecodeRows:
    """The rows of a batch that have one query each. scratch: see `Geometry.scratch_bytes`, zeros at first."""

    def __init__(self, geometry: Geometry, scratch: torch.Tensor) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self._geometry = geometry
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=geometry.tensor_cores)
        self._copy = _PlanCopy()

    def begin(self, batch: ForwardBatch) -> None:
        geometry, rows = self._geometry, slice(batch.num_decodes)
        lengths = _Lengths(batch.context_lens[rows], geometry.block_size)
        blocks = _listed(batch, rows, lengths, geometry)
        with self._copy:
            self._wrapper.plan(
                lengths.starts,
                blocks,
                lengths.last_tokens,
                head_dim=geometry.head_dim,
                **geometry.plan_arguments(),
            )

    def attend(self, q: torch.Tensor, kv: KV, out: torch.Tensor) -> None:
        self._wrapper.run(q, kv, out=out)


class ChunkRows:
    """The rows of a batch that have several queries, behind a prefix or not. Scratch as for `DecodeRows`.

    kernel: None takes FlashAttention 3 on Hopper, 2 elsewhere.
    """

    def __init__(self, geometry: Geometry, scratch: torch.Tensor, kernel: PromptKernel | None = None) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._geometry = geometry
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend=kernel or "auto")
        self._copy = _PlanCopy()

    def begin(self, batch: ForwardBatch) -> None:
        geometry, rows = self._geometry, slice(batch.num_decodes, None)
        lengths = _Lengths(batch.context_lens[rows], geometry.block_size)
        blocks = _listed(batch, rows, lengths, geometry)
        query_starts = _starts(np.array(batch.query_lens[rows], dtype=np.int32))
        with self._copy:
            self._wrapper.plan(
                query_starts,
                lengths.starts,
                blocks,
                lengths.last_tokens,
                head_dim_qk=geometry.head_dim,
                causal=True,
                max_token_per_sequence=batch.max_query,
                **geometry.plan_arguments(),
            )

    def attend(self, q: torch.Tensor, kv: KV, out: torch.Tensor) -> None:
        self._wrapper.run(q, kv, out=out)


def _listed(batch: ForwardBatch, rows: slice, lengths: _Lengths, geometry: Geometry) -> torch.Tensor:
    """The blocks of some rows, one row behind the other, on the device."""
    context_len, table_rows = batch.context_len[rows], batch.table_rows[rows]
    pages = PageList.empty(len(lengths.last_tokens), lengths.total, geometry.device)
    list_pages(pages, context_len, batch.paging[0].tables, table_rows, geometry.block_size, lengths.longest)
    return pages.blocks


class GraphRows:
    """A captured batch of rows with one query each. pages: memory for exactly these rows that outlives the graph.

    A batch of so many rows that none is split has the same plan whatever the lengths: it is made once, and a replay
    costs the host nothing. A smaller one is planned before every replay.
    """

    def __init__(self, geometry: Geometry, scratch: torch.Tensor, pages: PageList) -> None:
        self._geometry = geometry
        self._pages = pages
        self._rows = len(pages.last_tokens)
        self.planned_once = geometry.tensor_cores and self._rows >= geometry.split_limit
        self._wrapper = self._make_wrapper(scratch)
        self._copy = _PlanCopy()
        self._plan_first()

    def _make_wrapper(self, scratch: torch.Tensor) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self._pages.starts,
            "paged_kv_indices_buffer": self._pages.blocks,
            "paged_kv_last_page_len_buffer": self._pages.last_tokens,
        }
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            scratch,
            "NHD",
            use_tensor_cores=self._geometry.tensor_cores,
            # What FlashInfer does for graphs is to provide for other splits in later plans.
            **({} if self.planned_once else buffers),
        )
        plan = torch.zeros(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=scratch.device)
        wrapper.reset_workspace_buffer(scratch, plan)
        return wrapper

    def _plan_first(self) -> None:
        """For contexts of one token. The wrapper keeps `pages`, which `list_blocks` overwrites in every replay."""
        pages = self._pages
        pages.starts.copy_(torch.arange(self._rows + 1))
        pages.last_tokens.fill_(1)
        pages.blocks.zero_()
        with self._copy:
            self._wrapper.plan(
                pages.starts,
                pages.blocks,
                pages.last_tokens,
                head_dim=self._geometry.head_dim,
                disable_split_kv=self.planned_once,
                **self._geometry.plan_arguments(),
            )

    def plan(self, starts: Sequence[int]) -> None:
        """Before a replay. starts: positions of the first rows' queries; those behind them are padding, at 0."""
        if self.planned_once:
            return
        from flashinfer import fast_decode_plan

        padding = [1] * (self._rows - len(starts))
        lengths = _Lengths([*(start + 1 for start in starts), *padding], self._geometry.block_size)
        with self._copy:
            fast_decode_plan(
                self._wrapper,
                lengths.starts,
                self._pages.blocks,
                lengths.last_tokens,
                head_dim=self._geometry.head_dim,
                global_override_indptr_cpu=lengths.starts,
                **self._geometry.plan_arguments(),
            )

    def list_blocks(self, batch: ForwardBatch) -> None:
        """Part of the capture: every replay reads lengths and tables from the device."""
        tables = batch.paging[0].tables
        longest = tables.shape[1]
        list_pages(self._pages, batch.context_len, tables, batch.table_rows, self._geometry.block_size, longest)

    def attend(self, q: torch.Tensor, kv: KV, out: torch.Tensor) -> None:
        """Part of the capture."""
        self._wrapper.run(q, kv, out=out)
