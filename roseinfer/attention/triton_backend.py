"""Attention by this project's own kernels: one for rows that decode, one for prompt chunks."""

from collections.abc import Sequence

import numpy as np
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.select import AttentionShape
from roseinfer.kernels.decode_attention import DecodeWorkspace, choose_decode_config, decode_attention, plan_decode
from roseinfer.kernels.heads import store_heads
from roseinfer.kernels.prefill_attention import choose_prefill_config, map_blocks, prefill_attention, queries_per_block
from roseinfer.layers.heads import HeadTransform


class TritonAttention:
    """`AttentionBackend` for CUDA GPUs.

    Nothing waits for the device. A batch of decodes only, or one that brings its `chunk_map`, is read from the device
    alone, so that it can be captured in a CUDA graph, `begin` included.
    """

    def __init__(self, shape: AttentionShape) -> None:
        group = shape.heads // shape.kv_heads
        processors, overlap = _gpu_facts(shape.device)
        config = choose_decode_config(group, shape.head_dim, shape.dtype, overlap)
        self._workspace = DecodeWorkspace.allocate(
            config, shape.max_rows, shape.heads, shape.kv_heads, shape.head_dim, processors, shape.device
        )
        self._prefill_config = choose_prefill_config(group, shape.head_dim, shape.dtype)
        self._queries = queries_per_block(self._prefill_config, group)
        self._block_map: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._batch: ForwardBatch | None = None
        self._store: KVStore | None = None
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []  # K and V of each layer of the store

    def map_chunks(self, first_row: int, query_lens: Sequence[int], context_lens: Sequence[int]) -> np.ndarray:
        """What a captured step's `chunk_map` holds for chunk rows `first_row` and following: [g, 2] int32."""
        return map_blocks(first_row, query_lens, context_lens, self._queries)

    def max_chunks(self, tokens: int, rows: int) -> int:
        """The longest `chunk_map` of a step; it is filled up with -1."""
        return tokens // self._queries + rows

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        self._batch = batch
        if store is not self._store:
            self._store = store
            self._caches = [store.layer(i) for i in range(store.data.shape[1])]
        decodes = batch.num_decodes
        self._lengths = batch.context_len if batch.decode_len is None else batch.decode_len
        if decodes:
            plan_decode(self._lengths, decodes, self._workspace)
        self._block_map = batch.chunk_map
        if self._block_map is None and decodes < len(batch.query_lens):
            blocks = self.map_chunks(decodes, batch.query_lens[decodes:], batch.context_lens[decodes:])
            self._block_map = _upload(blocks, batch.context_len.device)

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "begin comes before forward"
        k_cache, v_cache = self._caches[layer]
        norms, rotary = heads.norms, heads.rotary
        store_heads(
            qkv,
            heads.heads,
            heads.kv_heads,
            heads.head_dim,
            k_cache,
            v_cache,
            batch.slots,
            batch.positions,
            None if rotary is None else rotary.cos_sin,
            None if norms is None else norms.query,
            None if norms is None else norms.key,
            0.0 if norms is None else norms.eps,
        )
        q = qkv.view(qkv.shape[0], -1, heads.head_dim)[:, : heads.heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._attend(q, k_cache, v_cache, out, heads.head_dim**-0.5)
        return out.view(q.shape[0], -1)

    def _attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor, scale: float
    ) -> None:
        batch = self._batch
        assert batch is not None
        tables, rows, lengths = batch.tables, batch.table_rows, batch.context_len
        if batch.num_decodes:
            decode_attention(q, k_cache, v_cache, tables, rows, self._lengths, out, scale, self._workspace)
        if self._block_map is not None:
            starts, blocks, config = batch.query_start, self._block_map, self._prefill_config
            prefill_attention(q, k_cache, v_cache, tables, rows, starts, lengths, out, blocks, scale, config)


def _gpu_facts(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors, and whether a kernel can start before its predecessor has ended."""
    if device.type != "cuda":  # under Triton's interpreter
        return 4, False
    facts = torch.cuda.get_device_properties(device)
    return facts.multi_processor_count, facts.major >= 9


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """To a GPU through pinned memory, which its allocator keeps until the copy is done, so that nothing waits."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
