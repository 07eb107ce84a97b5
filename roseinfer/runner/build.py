"""From configuration and a model folder to a runner that is ready for its first plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.core.config import EngineConfig
from roseinfer.core.errors import ConfigError
from roseinfer.models.base import CausalLM
from roseinfer.models.config import GenerationDefaults, read_generation_config, read_model_spec
from roseinfer.models.loader import load_model
from roseinfer.runner.cache_size import (
    check_context,
    default_cpu_cache_bytes,
    num_kv_blocks,
    resolve_max_model_len,
)
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.rehearsal import rehearse
from roseinfer.runner.seats import SeatTable

# On a CPU a rehearsal is only to load what is loaded lazily; a full prefill would take seconds.
CPU_REHEARSAL_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """What was found out while building. `model_type` is the architecture that config.json names.

    `default_sampling` holds the sampling fields that generation_config.json sets, `startup_s` seconds per phase.
    """

    model_type: str
    max_model_len: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    default_sampling: dict[str, float | int]
    startup_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    runner: ModelRunner
    facts: RunnerFacts


@dataclass(frozen=True, slots=True)
class _Shape:
    """Numbers that a runner is assembled from."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int


def build_runner(config: EngineConfig, folder: Path) -> BuiltRunner:
    """Load the model in `folder` and give it seats and a KV cache. Sets torch's number of CPU threads if asked to.

    Raises `ConfigError` naming the option that cannot be met, `ModelNotFoundError`, `UnsupportedModelError`.
    """
    startup_s: dict[str, float] = {}
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    with _phase(startup_s, "load"):
        device = resolve_device(config.model.device)
        spec = read_model_spec(folder, config.model.max_model_len)
        generation = read_generation_config(folder)
        check_context(config.model.max_model_len, spec.max_position)
        model = load_model(
            folder,
            spec,
            dtype=config.model.dtype,
            device=device,
            load_format=config.model.load_format,
            seed=config.model.seed,
        )
    with _phase(startup_s, "cache"):
        num_blocks = _num_blocks(config, model)
        max_model_len = resolve_max_model_len(
            config.model.max_model_len, spec.max_position, num_blocks * config.cache.block_size
        )
        shape = _Shape(config.cache.block_size, num_blocks, config.scheduler.max_num_seqs, max_model_len)
        runner, seats = _assemble(model, shape)
    with _phase(startup_s, "warm-up"):
        on_cpu = device.type == "cpu"
        rows = min(2, shape.max_num_seqs) if on_cpu else shape.max_num_seqs
        tokens = CPU_REHEARSAL_TOKENS if on_cpu else config.scheduler.max_num_batched_tokens
        rehearse(runner, seats, num_blocks, rows, tokens)
    facts = RunnerFacts(
        model_type=spec.architecture,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        vocab_size=spec.vocab_size,
        eos_token_ids=generation.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        default_sampling=_default_sampling(generation),
        startup_s=startup_s,
    )
    return BuiltRunner(runner, facts)


def resolve_device(name: str) -> torch.device:
    """`name` as in `ModelConfig`. Raises `ConfigError` for a GPU that is not there."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but PyTorch finds no CUDA GPU")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _num_blocks(config: EngineConfig, model: CausalLM) -> int:
    spec, block_size = model.spec, config.cache.block_size
    bytes_per_block = KVStore.bytes_per_block(
        spec.num_layers, block_size, spec.num_kv_heads, spec.head_dim, model.dtype
    )
    context = config.model.max_model_len or spec.max_position
    blocks_of_use = config.scheduler.max_num_seqs * -(-context // block_size)

    def default_bytes() -> int:
        if model.device.type == "cpu":
            return default_cpu_cache_bytes()
        return _free_cuda_bytes(config, model)

    return num_kv_blocks(config.cache, bytes_per_block, blocks_of_use, default_bytes)


def _assemble(model: CausalLM, shape: _Shape) -> tuple[ModelRunner, SeatTable]:
    spec = model.spec
    with _memory_for(f"a KV cache of {shape.num_blocks} blocks", "num_kv_blocks or kv_cache_memory_bytes"):
        store = KVStore(
            shape.num_blocks,
            spec.num_layers,
            shape.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            model.dtype,
            model.device,
        )
    with _memory_for(f"{shape.max_num_seqs} seats", "max_num_seqs"):
        seats = SeatTable(shape.max_num_seqs, shape.max_model_len, shape.block_size, spec.vocab_size, model.device)
    return ModelRunner(model, TorchAttention(), store, seats), seats


def _free_cuda_bytes(config: EngineConfig, model: CausalLM) -> int:
    """GPU memory for the KV cache: the configured share of the total, less what is in use and what a full step takes.

    A step of `max_num_batched_tokens` tokens in `max_num_seqs` rows is run over a small scratch cache to see its peak.
    """
    tokens, block_size = config.scheduler.max_num_batched_tokens, config.cache.block_size
    rows = min(config.scheduler.max_num_seqs, tokens)
    num_blocks = rows * (-(-tokens // rows) // block_size + 1)
    context = min(model.spec.max_position, tokens)
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    runner, seats = _assemble(model, _Shape(block_size, num_blocks, rows, context))
    rehearse(runner, seats, num_blocks, rows, tokens)
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    del runner, seats
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(total * config.cache.gpu_memory_utilization) - (total - free) - step_bytes


def _default_sampling(generation: GenerationDefaults) -> dict[str, float | int]:
    values = asdict(generation)
    del values["eos_token_ids"]
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _memory_for(what: str, options: str) -> Iterator[None]:
    """For allocations only: what these raise (OSError by the system, RuntimeError by torch) is want of memory."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        raise ConfigError(f"there is no memory for {what}; lower {options}") from error


@contextmanager
def _phase(startup_s: dict[str, float], name: str) -> Iterator[None]:
    began = perf_counter()
    yield
    startup_s[name] = perf_counter() - began
