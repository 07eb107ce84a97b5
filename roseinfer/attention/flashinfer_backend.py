"""FlashInfer's attention kernels (optional): FlashAttention 3 for prompts on Hopper, FlashAttention 2 for the rest.

They are compiled on first use, a minute each, and kept below ~/.cache/flashinfer.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch

from roseinfer.attention.base import AttentionShape
from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.flashinfer_rows import KV, ChunkRows, DecodeRows, Geometry, GraphRows, PromptKernel
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec, unsupported
from roseinfer.attention.store_qkv import store_qkv
from roseinfer.core.errors import ConfigError
from roseinfer.kernels.page_list import PageList
from roseinfer.kernels.triton_support import cdiv

HEAD_DIMS = (64, 128, 256)


def why_not(specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashInfer cannot compute these layers here, as the end of a sentence; None if it can. Imports nothing."""
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install 'roseinfer[flashinfer]'"
    if device.type != "cuda":
        return f"it runs on CUDA GPUs, not on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    unknown = {spec.head_dim for spec in specs} - set(HEAD_DIMS)
    if unknown:
        return f"it knows head dimensions {HEAD_DIMS}, not {min(unknown)}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if len(set(specs)) > 1:
        return "its plans serve all layers of a step, and the model's layers differ"
    return unsupported(specs, windows=False)


class _Part(Protocol):
    def attend(self, q: torch.Tensor, kv: KV, out: torch.Tensor) -> None:
        """q: [t, heads, D], the queries of these rows, which may lie apart. kv: `KVStore.layer`. out: [t, heads, D]."""
        ...


class FlashInferAttention:
    """`AttentionBackend` for 16-bit dtypes and head dimensions 64, 128 and 256 on GPUs from Ampere on.

    Batches that are captured in CUDA graphs, all of whose rows have one query: `prepare_capture` takes the place of
    `begin`, and the host divides the work of a step anew in `prepare_replay`.
    """

    def __init__(self, shape: AttentionShape, prompt_kernel: PromptKernel | None = None) -> None:
        """prompt_kernel: see `ChunkRows`. Raises `ConfigError` where FlashInfer cannot run."""
        reason = why_not(shape.specs, shape.dtype, shape.device)
        if reason is not None:
            raise ConfigError(f"attention_backend flashinfer cannot be used: {reason}")
        self._shape = shape
        self._geometry = Geometry.of(shape)
        self._scratch = torch.zeros(self._geometry.scratch_bytes(), dtype=torch.uint8, device=shape.device)
        self._decode = DecodeRows(self._geometry, self._scratch)
        self._chunks = ChunkRows(self._geometry, self._scratch, prompt_kernel)
        self._graphs: dict[int, GraphRows] = {}
        self._graph_pages: PageList | None = None
        self._store: KVStore | None = None
        self._layers: list[KV] = []
        self._parts: list[tuple[slice, _Part]] = []

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        self._adopt(batch, store)
        decodes = batch.num_decodes
        self._parts = []
        if decodes:
            self._decode.begin(batch)
            self._parts.append((slice(decodes), self._decode))
        if decodes < batch.num_rows:
            self._chunks.begin(batch)
            self._parts.append((slice(decodes, None), self._chunks))

    def prepare_capture(self, batch: ForwardBatch, store: KVStore) -> None:
        """`begin` for a capture: one launch. The first call for a number of rows prepares it and is not captured."""
        self._adopt(batch, store)
        rows = batch.num_rows
        assert rows <= self._shape.max_rows
        if rows not in self._graphs:
            self._graphs[rows] = GraphRows(self._geometry, self._scratch, self._pages_of_graphs().rows(rows))
        self._graphs[rows].list_blocks(batch)
        self._parts = [(slice(None), self._graphs[rows])]

    def prepare_replay(self, rows: int, starts: Sequence[int]) -> None:
        """Before a replay of the batch captured with `rows` rows. See `GraphRows.plan`."""
        self._graphs[rows].plan(starts)

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        kv = self._layers[layer]
        batch = self._batch
        store_qkv(qkv, heads, kv, batch.paging[0].slots, batch.positions)
        tokens, spec = qkv.shape[0], heads.spec
        q = qkv.view(tokens, spec.heads + 2 * spec.kv_heads, spec.head_dim)[:, : spec.heads]
        out = qkv.new_empty((tokens, spec.heads, spec.head_dim))
        for selected, part in self._parts:
            part.attend(q[selected], kv, out[selected])
        return out.view(tokens, -1)

    def _adopt(self, batch: ForwardBatch, store: KVStore) -> None:
        self._batch = batch
        if store is not self._store:
            self._layers = [store.layer(layer) for layer in range(len(self._shape.specs))]
            self._store = store

    def _pages_of_graphs(self) -> PageList:
        """One memory for all graphs: each writes it anew before it reads it."""
        if self._graph_pages is None:
            shape = self._shape
            blocks = shape.max_rows * cdiv(shape.max_model_len, shape.block_size)
            self._graph_pages = PageList.empty(shape.max_rows, blocks, shape.device)
        return self._graph_pages
