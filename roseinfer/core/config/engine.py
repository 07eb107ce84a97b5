"""Options of an engine as frozen dataclasses, from which the command line and `LLM(...)` are generated."""

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import isfinite
from typing import Any

from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.config.option import check_choices, check_positive, check_within, option, positive_numbers
from roseinfer.core.config.speculation import MAX_STEP_DRAFTS, SpeculationConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.generation_config import given_override

DEFAULT_POLICY = "slack"
PRICED = "priced"  # device of an engine without a model
DEFAULT_SEATS_COUNT = 256  # devices with much memory get more
DEFAULT_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Model to load, and how to load it."""

    model: str = option("tiny", "'tiny' (embedded), a folder, a GGUF file, or a Hugging Face id", metavar="MODEL")
    gguf_file: str | None = option(
        None, "the GGUF file to load of MODEL, a folder or an id; not needed if it has only one", metavar="NAME"
    )
    runner: str = option(
        "auto",
        "generate = text; pooling = embeddings or scores; auto = as the model's folder says",
        choices=("auto", "generate", "pooling"),
    )
    pooling: str = option(
        "auto",
        "how a model makes embeddings or scores: last, mean, cls = hidden states of the last, all or the first token; "
        'yes-no = probability of "yes" as next token; auto = as the model\'s folder says, else last',
        choices=("auto", "last", "mean", "cls", "yes-no"),
    )
    dtype: str = option(
        "auto",
        "weights and computation; auto = the checkpoint's on a GPU, float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "round the weights of linear layers while loading: fp8 or int4 (four bits, to measure) for GPUs, int8 for "
        "CPUs; floats = widen those that are in fewer bits; default: as the checkpoint is, and on a CPU int8 for "
        "folders in four bits",
        choices=("fp8", "int8", "int4", "floats"),
    )
    lm_head_dtype: str = option(
        "auto",
        "the output head's weights: auto = as computed; fp8 = rounded to eight bits, for GPUs, which read half of it",
        choices=("auto", "fp8"),
    )
    load_format: str = option("auto", "auto = safetensors or GGUF; dummy = random weights", choices=("auto", "dummy"))
    device: str = option(
        "auto", "auto = cuda if there is one; priced = no model, see --cost", choices=("auto", "cpu", "cuda", PRICED)
    )
    tensor_parallel_size: int = option(
        1, "GPUs that share the model, each with a part of every layer", aliases=("tp", "-tp"), metavar="N"
    )
    max_model_len: int | None = option(None, "context in tokens; default: the model's, as far as the cache holds it")
    tokenizer: str | None = option(None, "folder, GGUF file or id of another tokenizer", metavar="MODEL")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    download_dir: str | None = option(None, "where downloads are kept; default: the hub's cache", metavar="DIR")
    generation_config: str = option(
        "auto",
        "sampling defaults of requests: auto = the model's, none = OpenAI's, or a file or folder with a "
        "generation_config.json",
        metavar="auto|none|PATH",
    )
    override_generation_config: str | None = option(
        None,
        "sampling defaults that replace single ones of --generation-config, for example '{\"temperature\": 0.6}'; null "
        "removes one",
        metavar="JSON",
    )
    attention_backend: str = option(
        "auto",
        "auto = triton on a GPU, torch on a CPU; flashinfer was removed and means auto",
        choices=("auto", "triton", "flashinfer", "torch"),
    )
    enforce_eager: bool = option(False, "launch the kernels of a step one by one instead of replaying CUDA graphs")
    seed: int = option(0, "seeds dummy weights and the requests that bring no seed")
    threads: int | None = option(None, "CPU threads of the engine; default: all cores")

    def __post_init__(self) -> None:
        check_choices(self)
        given_override(self.override_generation_config)
        if self.pooling != "auto" and self.runner == "generate":
            raise ConfigError(f"pooling={self.pooling} cannot be combined with runner=generate")
        check_positive(self, "max_model_len", "threads", "tensor_parallel_size")
        if self.tensor_parallel_size > 1 and self.device == PRICED:
            raise ConfigError(f"tensor_parallel_size must be 1 with device={PRICED}, which has no model to share")
        file = self.gguf_file
        if file is not None and (not file.endswith(".gguf") or file.startswith("/") or ".." in file.split("/")):
            raise ConfigError(f"gguf_file must be the name of a .gguf file within the model, got {file!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Paged KV cache."""

    block_size: int = option(16, "tokens of a KV block, a power of two up to 256")
    num_kv_blocks: int | None = option(None, "KV blocks; default: as many as fit in memory")
    kv_cache_memory_bytes: int | None = option(None, "memory of the KV cache; default: a share of the free memory")
    kv_cache_dtype: str = option(
        "auto",
        "type of K and V in the cache: auto = as computed; fp8 = half the size of 16 bits",
        choices=("auto", "fp8"),
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory for weights, activations and KV cache")
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts seen before", aliases=("prefix_cache",))
    enable_window_groups: bool = option(
        True,
        "keep K and V of layers with an attention window only as far as the window reaches, if other layers have none",
    )
    typical_context: int | None = option(
        None,
        "context in tokens at which layers with and without an attention window run out of memory together; default: "
        "the geometric mean of the longest window and the longest context, or 8192 beside recurrent states",
    )
    state_slots: int | None = option(
        None,
        "slots for recurrent states, of running requests and of cached prefixes; default: as many as fit in memory; "
        "device priced: the model has none",
    )
    kv_offloading_size: float = option(
        0.0, "GiB of host memory per engine for KV blocks beyond the KV cache; 0 = none", metavar="GIB"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "block_size", "num_kv_blocks", "kv_cache_memory_bytes")
        check_positive(self, "typical_context", "state_slots")
        if not (isfinite(self.kv_offloading_size) and self.kv_offloading_size >= 0):
            raise ConfigError(f"kv_offloading_size must not be negative, got {self.kv_offloading_size}")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError("kv_offloading_size needs enable_prefix_caching, which finds blocks in host memory")
        check_block_size(self.block_size)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be within (0, 1], got {self.gpu_memory_utilization}")


# Policy option for the tokens of steps that may exceed `max_num_batched_tokens`.
BURST_TOKENS = "slack_burst_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step, and the scheduling policy. `policy_name` combines the two options that name a policy.

    `policy_options` holds the given options of that policy. Each policy defines its own beside its code;
    `sched/registry.py` checks them and builds this config from all options together (`scheduler_config`).
    """

    scheduling_policy: str | None = option(
        None, f"policy that starts, runs and rejects requests (default: {DEFAULT_POLICY})", metavar="NAME"
    )
    max_num_seqs: int | None = option(
        None, "seats: maximum number of running requests; default: 256, or 512 on a GPU with at least 64 GiB of memory"
    )
    max_num_batched_tokens: int = option(DEFAULT_STEP_TOKENS, "maximum tokens of one step, decode and prefill together")
    max_active_requests: int | None = option(None, "maximum number of running requests, if below --max-num-seqs")
    max_inflight_requests: int | None = option(None, "requests in the engine, waiting ones included; more get a 429")
    enable_chunked_prefill: bool = option(True, "split long prompts over steps", aliases=("chunked_prefill",))
    prefill_admission_policy: str | None = option(None, "alias of --scheduling-policy", choices=("fifo", "pack"))
    overlap: bool | None = option(None, "plan step k+1 while step k runs; default: on a GPU")
    idle_checks: bool = option(True, "check that seats, queues and KV blocks are consistent while the engine is idle")
    policy_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_active_requests", "max_inflight_requests")
        if self.largest_step > self.max_num_batched_tokens and not self.enable_chunked_prefill:
            raise ConfigError(f"{BURST_TOKENS} needs enable_chunked_prefill: other prompts are never split")
        named = {self.scheduling_policy, self.prefill_admission_policy} - {None}
        if len(named) > 1:
            raise ConfigError("scheduling_policy and prefill_admission_policy name different policies")

    @property
    def policy_name(self) -> str:
        return self.scheduling_policy or self.prefill_admission_policy or DEFAULT_POLICY

    @property
    def largest_step(self) -> int:
        """Return the maximum tokens of a step, apart from prompts that are not chunked."""
        return max(self.max_num_batched_tokens, self.policy_options.get(BURST_TOKENS) or 0)

    @property
    def seats(self) -> int:
        """Return the number of requests that can hold a seat at once."""
        return self.max_num_seqs or DEFAULT_SEATS_COUNT

    @property
    def max_running(self) -> int:
        """Return the maximum number of running requests."""
        return min(self.seats, self.max_active_requests or self.seats)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Recording of step times, or of the whole run. It costs nothing while off."""

    profile: str | None = option(None, "write traces of some steps there, and mark all with NVTX ranges", metavar="DIR")
    profile_steps: int = option(16, "steps of a trace")
    profile_start: tuple[int, ...] = option((), "first step of a trace; repeatable (default: 64)")
    record: str | None = option(
        None, "record the run for replay: every request with its prompt, plans and step times", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_positive(self, "profile_steps")
        starts = self.starts
        if starts[0] < 0:
            raise ConfigError(f"profile_start must be 0 or more, got {starts[0]}")
        if any(later - earlier < self.profile_steps for earlier, later in pairwise(starts)):
            raise ConfigError(f"profile_start: traces of {self.profile_steps} steps must not overlap")

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first steps of the traces in order. At the default, caches and clock speeds have settled."""
        return tuple(sorted(self.profile_start)) or (64,)


MAX_PRICED_FACTOR = 1e6  # on step times


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedConfig:
    """Engines of device `priced`: no model, and step times from a cost model."""

    cost: str | None = option(
        None, "device priced: cost model of steps, a file written by `roseinfer calibrate`", metavar="FILE"
    )
    slow: str | None = option(
        None, "device priced: factor on the step times of each engine: a,b,...", metavar="FACTORS"
    )
    noise: float = option(0.0, "device priced: multiply each step time by 1 + |N(0, noise)|")
    mean_output_len: float = option(
        128.0, "device priced: mean tokens of outputs that nothing else ends, drawn from seed and prompt"
    )

    def __post_init__(self) -> None:
        check_within(self, 0, MAX_PRICED_FACTOR, "noise")
        if not (isfinite(self.mean_output_len) and self.mean_output_len >= 1):
            raise ConfigError(f"mean_output_len must be 1 or more, got {self.mean_output_len}")
        if max(self.slow_list, default=0.0) > MAX_PRICED_FACTOR:
            raise ConfigError(f"slow must not exceed {MAX_PRICED_FACTOR:g}, got {self.slow}")

    @property
    def slow_list(self) -> tuple[float, ...]:
        """Return one factor per engine, or an empty tuple."""
        return positive_numbers("slow", self.slow, float)

    def for_engine(self, engine: int, engines: int) -> "PricedConfig":
        """Return the config of one engine. Raise `ConfigError` unless there is one factor per engine."""
        factors = self.slow_list
        if not factors:
            return self
        if len(factors) != engines:
            raise ConfigError(f"slow must have one factor per engine, got {len(factors)} for {engines} engines")
        return replace(self, slow=str(factors[engine]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All options of an engine. `engines`: number of engines of the server; on a CPU they share its memory.

    `other_engines`: those of the server's other models. `shares_gpu`: some of these use the same GPUs.
    `ranks_on_one_gpu`: all processes of this engine use one GPU, for testing.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    priced: PricedConfig = field(default_factory=PricedConfig)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    engines: int = 1
    other_engines: int = 0
    shares_gpu: bool = False
    ranks_on_one_gpu: bool = False

    def __post_init__(self) -> None:
        given = next((f.name for f in fields(PricedConfig) if getattr(self.priced, f.name) != f.default), None)
        if given is not None and self.model.device != PRICED:
            raise ConfigError(f"{given} needs device={PRICED}, got {self.model.device}")
        if self.kv_events.kv_events_endpoint is not None and not self.cache.enable_prefix_caching:
            raise ConfigError("kv_events_endpoint needs enable_prefix_caching: otherwise no block is ever reused")
        _check_speculation(self)

    @property
    def max_step_drafts(self) -> int:
        """Return the maximum drafts of all rows of a step, for which the runner has buffers."""
        values = self.speculation.values
        if values is None or self.profile.record is not None:
            return 0
        return min(self.scheduler.seats * values.tokens, MAX_STEP_DRAFTS, self.scheduler.max_num_batched_tokens)

    @property
    def max_row_drafts(self) -> int:
        """Return the maximum drafts of a row, for which each slot of recurrent states has room."""
        values = self.speculation.values
        return 0 if values is None or not self.max_step_drafts else values.tokens

    def for_engine(self, engine: int, engines: int) -> "EngineConfig":
        """Return the config of engine number `engine` of the `engines` of its model, counted from 0.

        Raise `ConfigError` if a per-engine option has not one value per engine.
        """
        priced, kv_events = self.priced.for_engine(engine, engines), self.kv_events.for_engine(engine, engines)
        return replace(self, priced=priced, kv_events=kv_events, engines=engines + self.other_engines)


def _check_speculation(config: EngineConfig) -> None:
    """Raise `ConfigError` for a method that the other options exclude."""
    name = config.speculation.speculation
    if config.speculation.recorded and config.model.load_format != "dummy":
        raise ConfigError(f"speculation {name!r} is for benchmarks with random weights: it needs load_format dummy")
    if config.speculation.chosen and config.profile.record is not None:
        raise ConfigError(f"record cannot be combined with speculation={name}")


def check_block_size(size: int) -> None:
    """Raise `ConfigError` for a KV block size that the kernels do not support."""
    if size & (size - 1) or size > 256:
        raise ConfigError(f"block_size must be a power of two up to 256, got {size}")
