"""Attention by this project's own kernels: one for rows that decode, one for prompt chunks."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.select import AttentionShape
from roseinfer.attention.side_stream import SideStream
from roseinfer.attention.store_qkv import store_qkv
from roseinfer.kernels.decode_attention import DecodeWorkspace, choose_decode_config, decode_attention, plan_decode
from roseinfer.kernels.prefill_attention import (
    SMALL_STEP,
    PrefillConfig,
    choose_prefill_config,
    map_blocks,
    prefill_attention,
    queries_per_block,
)

# A captured step's map of chunks has room for what its tokens fill and for as many chunks that end a block early. More
# would cost every replay: a multiprocessor needs a while to find out that an entry is empty (6 us for 256 of them).
_SHORT_CHUNKS = 32


class TritonAttention:
    """`AttentionBackend` for CUDA GPUs.

    In a mixed step the chunks' kernel runs beside the decodes' (H200, heads as Qwen3-8B's: 60 decodes of 100 to 900
    tokens and 128 tokens of a prompt take 48 us a layer instead of 57). Nothing waits for the device. A batch of
    decodes only, or one that brings its `chunk_map`, is read from the device alone, so that it can be captured in a
    CUDA graph, `begin` included.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._group = shape.heads // shape.kv_heads
        processors = _processors(shape.device)
        config = choose_decode_config(self._group, shape.head_dim, shape.dtype)
        self._workspace = DecodeWorkspace.allocate(
            config, shape.max_rows, shape.heads, shape.kv_heads, shape.head_dim, processors, shape.device
        )
        self._side = SideStream(shape.device)
        self._prefill_config = self._config_for(1)
        self._block_map: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._batch: ForwardBatch | None = None
        self._store: KVStore | None = None
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []  # K and V of each layer of the store

    def map_chunks(
        self, tokens: int, first_row: int, query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> np.ndarray:
        """What the `chunk_map` of a step of `tokens` tokens, padding included, holds for its chunk rows: [g, 2] int32.

        Chunk rows are `first_row` and following.
        """
        return map_blocks(first_row, query_lens, context_lens, self._queries(tokens))

    def max_chunks(self, tokens: int, rows: int) -> int:
        """Entries of the `chunk_map` of a captured step; a map is filled up with -1, and one that is longer is not run.

        Maps of up to 32 chunks are never longer.
        """
        return tokens // self._queries(tokens) + min(rows, _SHORT_CHUNKS)

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        self._batch = batch
        if store is not self._store:
            self._store = store
            self._caches = [store.layer(i) for i in range(store.data.shape[1])]
            self._load_kernels(batch)
        tokens, decodes = batch.input_ids.shape[0], batch.num_decodes
        self._prefill_config = self._config_for(tokens)
        self._lengths = batch.context_len if batch.decode_len is None else batch.decode_len
        if decodes:
            plan_decode(self._lengths, decodes, self._workspace)
        self._block_map = batch.chunk_map
        if self._block_map is None and decodes < len(batch.query_lens):
            blocks = self.map_chunks(tokens, decodes, batch.query_lens[decodes:], batch.context_lens[decodes:])
            self._block_map = _upload(blocks, batch.context_len.device)

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "begin comes before forward"
        kv = self._caches[layer]
        store_qkv(qkv, heads, kv, batch)
        q = qkv.view(qkv.shape[0], -1, heads.head_dim)[:, : heads.heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._attend(q, *kv, out, heads.head_dim**-0.5)
        return out.view(q.shape[0], -1)

    def _attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, scale: float
    ) -> None:
        batch = self._batch
        assert batch is not None
        tables, rows, lengths = batch.tables, batch.table_rows, batch.context_len
        mixed = bool(batch.num_decodes) and self._block_map is not None
        with self._side.beside() if mixed else nullcontext():
            if self._block_map is not None:
                starts, blocks, config = batch.query_start, self._block_map, self._prefill_config
                prefill_attention(q, k_cache, v_cache, tables, rows, starts, lengths, out, blocks, scale, config)
        if batch.num_decodes:
            decode_attention(q, k_cache, v_cache, tables, rows, self._lengths, out, scale, self._workspace)
        if mixed:
            self._side.join()

    def _config_for(self, tokens: int) -> PrefillConfig:
        return choose_prefill_config(tokens, self._group, self._shape.head_dim, self._shape.dtype)

    def _queries(self, tokens: int) -> int:
        return queries_per_block(self._config_for(tokens), self._group)

    def _load_kernels(self, batch: ForwardBatch) -> None:
        """Launch every variant over no rows, so that none is compiled while serving, whatever the steps look like."""
        shape = self._shape
        heads, size = shape.heads, shape.head_dim
        empty = {"dtype": shape.dtype, "device": shape.device}
        q = torch.empty((1, heads + 2 * shape.kv_heads, size), **empty)[:, :heads]
        out = torch.empty((1, heads, size), **empty)
        nothing = torch.full((1, 2), -1, dtype=torch.int32, device=shape.device)
        cache = (*self._caches[0], batch.tables, batch.table_rows)
        for tokens in (SMALL_STEP, SMALL_STEP + 1):
            starts, lengths, config = batch.query_start, batch.context_len, self._config_for(tokens)
            prefill_attention(q, *cache, starts, lengths, out, nothing, 1.0, config)
        plan_decode(batch.context_len, 0, self._workspace)
        decode_attention(q, *cache, batch.context_len, out, 1.0, self._workspace)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":  # under Triton's interpreter
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """To a GPU through pinned memory, which its allocator keeps until the copy is done, so that nothing waits."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
