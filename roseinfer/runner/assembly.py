"""Assembly of a runner from its parts, as its device and attention backend require."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from roseinfer.adapters.memory import AdapterMemory
from roseinfer.attention.base import (
    AttentionBackend,
    AttentionShape,
    GraphableAttention,
)
from roseinfer.attention.groups import KVGroups
from roseinfer.attention.host_store import BlockStore, HostStore
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.select import make_attention
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import StepLimits
from roseinfer.core.progress import stage
from roseinfer.models.base import CausalLM
from roseinfer.models.eagle.model import DraftingModel
from roseinfer.models.pooling.config import PoolingSpec
from roseinfer.models.pooling.heads import EmbeddingHead, YesNoHead
from roseinfer.parallel.group import LiveGroup, SingleRank
from roseinfer.runner.cuda_graphs import DecodeGraphs, GraphRecorder, decode_buckets
from roseinfer.runner.draft_steps import DraftSteps, HeadSteps
from roseinfer.runner.forward import EagerForward, ForwardPass, from_rows
from roseinfer.runner.host_copies import Copier, CpuCopier
from roseinfer.runner.mixed_graphs import MixedGraphs, mixed_buckets
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.plan_state import PlanState
from roseinfer.runner.pooling import Pooler, PoolingHead
from roseinfer.runner.pooling_runner import PoolingRunner
from roseinfer.runner.seats import SeatTable
from roseinfer.runner.state_slots import StateSlots
from roseinfer.state.store import StateStore


@dataclass(frozen=True, slots=True)
class Shape:
    """Inputs of `assemble`.

    num_blocks: KV blocks of the first of `groups`; window_blocks: of each further group. num_slots: slots of
    recurrent states, at least one if the model has states. backend: as `resolve_backend` returns. kv_dtype: format of K
    and V in the store. num_host_blocks: KV blocks in host memory, 0 for none. num_host_slots: slots there.
    captured_tokens: size of the largest step with prompts that is captured. pooling: how vectors are made; None for
    generated text. max_ahead: most drafts that a head makes after a row. row_drafts: most drafts that a row verifies.
    adapters: slots and files of LoRA adapters; None without.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    limits: StepLimits
    captured_tokens: int
    backend: str
    kv_dtype: torch.dtype
    graphs: bool
    groups: KVGroups
    window_blocks: tuple[int, ...] = ()
    num_slots: int = 0
    num_host_blocks: int = 0
    num_host_slots: int = 0
    pooling: PoolingSpec | None = None
    max_ahead: int = 0
    row_drafts: int = 0
    adapters: AdapterMemory | None = None

    @property
    def all_blocks(self) -> tuple[int, ...]:
        """KV blocks of each of `groups`."""
        return (self.num_blocks, *self.window_blocks)


@runtime_checkable
class Capturable(Protocol):
    def capture(self, pool: Any) -> None:
        """Record CUDA graphs with this memory pool."""
        ...


@dataclass(frozen=True, slots=True)
class Assembly:
    """Runner and its parts.

    graphs: captured after a rehearsal; empty if every step is launched kernel by kernel. graphable: True if graphs are
    possible. forward: the runner's. copier: None without blocks in host memory. draft_steps: of a model with a draft
    head.
    """

    runner: ModelRunner | PoolingRunner
    forward: ForwardPass
    seats: SeatTable
    graphable: bool
    graphs: tuple[Capturable, ...]
    copier: Copier | None = None
    draft_steps: HeadSteps | None = None

    def capture(self) -> None:
        """Record the graphs, which share one memory pool."""
        pool = torch.cuda.graph_pool_handle()
        for graphs in self.graphs:
            graphs.capture(pool)
        torch.cuda.synchronize()


def assemble(model: CausalLM, shape: Shape, group: LiveGroup | None = None) -> Assembly:
    """Assemble a runner. `group`: processes that share the model. Raise `ConfigError` if memory is short."""
    spec = model.spec
    with _memory_for(f"a KV cache of {shape.num_blocks} blocks", "num_kv_blocks or kv_cache_memory_bytes"):
        store = _store(model, shape)
    states = None
    specs = model.state_specs(shape.row_drafts)
    if specs:
        with _memory_for(f"{shape.num_slots} slots of recurrent states", "state_slots"):
            states = _state_slots(StateStore(shape.num_slots + 1, specs, model.device), shape)
    with _memory_for(f"{shape.max_num_seqs} seats", "max_num_seqs"):
        seats = SeatTable(
            shape.max_num_seqs,
            shape.max_model_len,
            shape.block_size,
            spec.vocab_size,
            model.device,
            spare_blocks=shape.all_blocks,
            states=states,
            adapters=shape.adapters is not None,
        )
        attention = make_attention(shape.backend, _attention_shape(model, shape))
    forward, graphs = _forward_pass(model, attention, store, seats, shape, group or SingleRank())
    copier = None
    if shape.num_host_blocks:
        with stage("taking host memory for K and V"):
            copier = make_copier(store, HostStore(shape.num_host_blocks, store))
    runner: ModelRunner | PoolingRunner
    draft_steps: HeadSteps | None = None
    if shape.pooling is None:
        if isinstance(model, DraftingModel):
            model.take_seats(shape.max_num_seqs + 1, shape.limits.max_tokens)
            draft_steps = _draft_steps(model, attention, store, seats, shape)
            if shape.graphs and isinstance(draft_steps, Capturable):
                graphs = (*graphs, draft_steps)
        runner = ModelRunner(model, forward, store, seats, shape.limits, copier, draft_steps, shape.adapters)
    else:
        pooler = _pooler(model, shape.pooling, seats)
        runner = PoolingRunner(forward, PlanState(store, seats, copier), shape.limits, pooler)
    return Assembly(runner, forward, seats, isinstance(attention, GraphableAttention), graphs, copier, draft_steps)


def _store(model: CausalLM, shape: Shape) -> KVStore:
    """Return a store with one block more in each group than the scheduler knows, for rows that only pad a batch."""
    return KVStore(
        shape.num_blocks + 1,
        shape.block_size,
        model.attention,
        shape.kv_dtype,
        model.device,
        shape.groups,
        [blocks + 1 for blocks in shape.window_blocks],
    )


def pooling_head(model: CausalLM, spec: PoolingSpec) -> PoolingHead:
    """Return the model's head for vectors. Raise `ModelNotFoundError` or `UnsupportedModelError` for its weights."""
    if spec.yes_no is not None:
        return YesNoHead(model, *spec.yes_no)
    return EmbeddingHead(model.normed, model.spec.hidden_size, spec.dense, model.device, normalized=spec.normalized)


def _pooler(model: CausalLM, spec: PoolingSpec, seats: SeatTable) -> Pooler:
    head = pooling_head(model, spec)
    return Pooler(spec.method, head, seats, model.spec.hidden_size, normalized=spec.normalized)


def _state_slots(store: StateStore, shape: Shape) -> StateSlots:
    copier = None
    if shape.num_host_slots:
        with stage("taking host memory for states"):
            copier = make_copier(store, HostStore(shape.num_host_slots, store))
    return StateSlots(store, shape.max_num_seqs, copier)


def make_copier(store: BlockStore, host: HostStore) -> Copier:
    if not store.blocks[0].is_cuda:
        return CpuCopier(store, host)
    from roseinfer.runner.cuda_host_copies import CudaCopier

    return CudaCopier(store, host)


def _forward_pass(
    model: CausalLM, attention: AttentionBackend, store: KVStore, seats: SeatTable, shape: Shape, group: LiveGroup
) -> tuple[ForwardPass, tuple[Capturable, ...]]:
    if not isinstance(attention, GraphableAttention):
        return EagerForward(model, attention, store, from_rows(seats)), ()
    from roseinfer.runner.cuda_inputs import CudaInputs
    from roseinfer.runner.cuda_sampler import CudaTokenChooser

    inputs = CudaInputs(seats, shape.limits.max_rows, shape.limits.max_tokens, shape.limits.max_drafts)
    eager = EagerForward(model, attention, store, inputs.prepare)
    if not shape.graphs:
        return eager, ()
    costly_padding = model.spec.experts is not None or bool(model.spec.deltas)
    buckets = decode_buckets(shape.limits.max_rows, costly_padding=costly_padding)
    choice = CudaTokenChooser(seats)
    recorder, mixed_sizes = GraphRecorder(), mixed_buckets(shape.captured_tokens)
    drafts = shape.limits.max_drafts > 0
    mixed = MixedGraphs(eager, model, attention, store, inputs, mixed_sizes, group.minimum, recorder, drafts=drafts)
    if shape.pooling is not None:
        return mixed, (mixed,)
    decodes = DecodeGraphs(mixed, model, attention, store, inputs, buckets, choice, recorder)
    return decodes, (decodes, mixed)


def _draft_steps(
    model: DraftingModel, attention: AttentionBackend, store: KVStore, seats: SeatTable, shape: Shape
) -> HeadSteps:
    if not isinstance(attention, GraphableAttention):
        return DraftSteps(model, attention, store, seats)
    from roseinfer.runner.cuda_draft_steps import CudaDraftSteps

    rows = shape.limits.max_rows
    return CudaDraftSteps(model, attention, store, seats, rows, shape.max_ahead, GraphRecorder())


def _attention_shape(model: CausalLM, shape: Shape) -> AttentionShape:
    return AttentionShape(
        specs=model.attention,
        max_rows=shape.limits.max_rows,
        max_tokens=shape.limits.max_tokens,
        max_model_len=shape.max_model_len,
        block_size=shape.block_size,
        dtype=model.dtype,
        kv_dtype=shape.kv_dtype,
        device=model.device,
    )


@contextmanager
def _memory_for(what: str, options: str) -> Iterator[None]:
    """Report failed allocations: OSError comes from the system, RuntimeError from torch. Use it for
    allocations only.
    """
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(f"out of memory for {what}; lower {options}") from error
