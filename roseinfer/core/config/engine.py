"""The options of an engine. The command line is generated from these frozen dataclasses, and so is `LLM(...)`."""

from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import isfinite
from typing import Any

from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.config.option import check_choices, check_positive, option, positive_numbers
from roseinfer.core.errors import ConfigError

DEFAULT_POLICY = "slack"
PRICED = "priced"  # the device of an engine without a model
SEATS = 256  # unless the device is large enough for more


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    model: str = option("tiny", "'tiny' (embedded), a folder, a GGUF file, or a Hugging Face id", metavar="MODEL")
    gguf_file: str | None = option(None, "the GGUF file to load of MODEL, a folder or an id", metavar="NAME")
    dtype: str = option(
        "auto",
        "weights and computation; auto = the checkpoint's on a GPU, float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "round the weights of linear layers to eight bits while loading: fp8 for GPUs, int8 for CPUs; default: as the "
        "checkpoint is",
        choices=("fp8", "int8"),
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
        check_positive(self, "max_model_len", "threads", "tensor_parallel_size")
        if self.tensor_parallel_size > 1 and self.device == PRICED:
            raise ConfigError(
                f"tensor_parallel_size: an engine of device {PRICED} has no model to share; its cost model says what "
                "steps take"
            )
        file = self.gguf_file
        if file is not None and (not file.endswith(".gguf") or file.startswith("/") or ".." in file.split("/")):
            raise ConfigError(f"gguf_file must be the name of a .gguf file within the model, got {file!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = option(16, "tokens of a KV block, a power of two up to 256")
    num_kv_blocks: int | None = option(None, "KV blocks; default: from the memory")
    kv_cache_memory_bytes: int | None = option(None, "memory of the KV cache; default: a share of what is free")
    kv_cache_dtype: str = option(
        "auto", "K and V in the cache: auto = as they are computed; fp8 = in half of 16 bits", choices=("auto", "fp8")
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory for weights, activations and KV cache")
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts seen before", aliases=("prefix_cache",))
    kv_offloading_size: float = option(
        0.0, "GiB of host memory, of each engine, for KV blocks beyond those of the KV cache; 0 = none", metavar="GIB"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "block_size", "num_kv_blocks", "kv_cache_memory_bytes")
        if not (isfinite(self.kv_offloading_size) and self.kv_offloading_size >= 0):
            raise ConfigError(f"kv_offloading_size must not be negative, got {self.kv_offloading_size}")
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError("kv_offloading_size needs enable_prefix_caching: blocks in host memory are found by it")
        check_block_size(self.block_size)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be within (0, 1], got {self.gpu_memory_utilization}")


# The option of a policy that may have steps of more tokens than `max_num_batched_tokens`: that many.
BURST_TOKENS = "slack_burst_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold, and who decides. `policy_name` is the policy that the two options for it name.

    `policy_options` holds the options of that policy that were given. Each policy defines its own, beside its code:
    `sched/registry.py` knows them, checks them, and makes this from all options together (`scheduler_config`).
    """

    scheduling_policy: str | None = option(
        None, f"who runs, who starts, who is turned away (default: {DEFAULT_POLICY})", metavar="NAME"
    )
    max_num_seqs: int | None = option(
        None, "seats: requests that run at once; default: 256, and 512 on a GPU with 64 GiB of memory or more"
    )
    max_num_batched_tokens: int = option(2048, "tokens computed in one step, decode and prefill together")
    max_active_requests: int | None = option(None, "requests that run at once, if fewer than the seats")
    max_inflight_requests: int | None = option(None, "requests in the engine, waiting ones included; more get a 429")
    enable_chunked_prefill: bool = option(True, "split long prompts over steps", aliases=("chunked_prefill",))
    prefill_admission_policy: str | None = option(None, "another name of --scheduling-policy", choices=("fifo", "pack"))
    overlap: bool | None = option(None, "plan step k+1 while step k runs; default: on a GPU")
    idle_checks: bool = option(True, "check the books of seats, queues and KV blocks while the engine idles")
    policy_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "max_num_seqs", "max_num_batched_tokens", "max_active_requests", "max_inflight_requests")
        if self.largest_step > self.max_num_batched_tokens and not self.enable_chunked_prefill:
            raise ConfigError(f"{BURST_TOKENS}: prompts that are not chunked are computed whole in any step")
        named = {self.scheduling_policy, self.prefill_admission_policy} - {None}
        if len(named) > 1:
            raise ConfigError("scheduling_policy and prefill_admission_policy name different policies")

    @property
    def policy_name(self) -> str:
        return self.scheduling_policy or self.prefill_admission_policy or DEFAULT_POLICY

    @property
    def largest_step(self) -> int:
        """Tokens of a step at most, but for prompts that are not chunked."""
        return max(self.max_num_batched_tokens, self.policy_options.get(BURST_TOKENS) or 0)

    @property
    def seats(self) -> int:
        """Requests that have room at once."""
        return self.max_num_seqs or SEATS

    @property
    def max_running(self) -> int:
        """Requests that may run at once."""
        return min(self.seats, self.max_active_requests or self.seats)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Recording where the time of steps goes, or the whole run. Off, it costs nothing."""

    profile: str | None = option(None, "write traces of some steps there, and mark all with NVTX ranges", metavar="DIR")
    profile_steps: int = option(16, "steps of a trace")
    profile_start: tuple[int, ...] = option(
        (), "step with which a trace begins; may be given several times (default: 64)"
    )
    record: str | None = option(
        None, "write the run there, to replay it: every request with its prompt, plan and step time", metavar="FILE"
    )

    def __post_init__(self) -> None:
        check_positive(self, "profile_steps")
        starts = self.starts
        if starts[0] < 0:
            raise ConfigError(f"profile_start must be 0 or more, got {starts[0]}")
        if any(later - earlier < self.profile_steps for earlier, later in pairwise(starts)):
            raise ConfigError(f"profile_start: traces of {self.profile_steps} steps overlap")

    @property
    def starts(self) -> tuple[int, ...]:
        """The first steps of the traces, in order. By the default, caches and clocks have settled."""
        return tuple(sorted(self.profile_start)) or (64,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedConfig:
    """`device` priced: engines without a model, whose steps take as long as a cost model says."""

    cost: str | None = option(
        None, "device priced: what steps cost, from a file that `roseinfer calibrate` wrote", metavar="FILE"
    )
    slow: str | None = option(
        None, "device priced: steps of each engine take so many times as long: a,b,...", metavar="FACTORS"
    )
    noise: float = option(0.0, "device priced: a step takes 1 + |N(0, noise)| times what it costs")
    mean_output_len: float = option(
        128.0, "device priced: mean tokens of outputs that nothing else ends, drawn for each from its seed and prompt"
    )

    def __post_init__(self) -> None:
        if not (isfinite(self.noise) and self.noise >= 0):
            raise ConfigError(f"noise must not be negative, got {self.noise}")
        if not (isfinite(self.mean_output_len) and self.mean_output_len >= 1):
            raise ConfigError(f"mean_output_len must be 1 or more, got {self.mean_output_len}")
        _ = self.slow_list

    @property
    def slow_list(self) -> tuple[float, ...]:
        """A factor for each engine; empty if none were given."""
        return positive_numbers("slow", self.slow)

    def for_engine(self, engine: int, engines: int) -> "PricedConfig":
        """What the engine of this number is to be given. Raises `ConfigError` unless there are as many factors."""
        factors = self.slow_list
        if not factors:
            return self
        if len(factors) != engines:
            raise ConfigError(f"slow: {len(factors)} factors were given for {engines} engines")
        return replace(self, slow=str(factors[engine]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All an engine needs. `engines`: how many the server has, this one included; on a CPU they share its memory."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    priced: PricedConfig = field(default_factory=PricedConfig)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
    engines: int = 1

    def __post_init__(self) -> None:
        given = next((f.name for f in fields(PricedConfig) if getattr(self.priced, f.name) != f.default), None)
        if given is not None and self.model.device != PRICED:
            raise ConfigError(f"{given} is an option of device {PRICED}; this one is {self.model.device}")
        if self.kv_events.kv_events_endpoint is not None and not self.cache.enable_prefix_caching:
            raise ConfigError("kv_events_endpoint needs enable_prefix_caching: without it no block is found again")

    def for_engine(self, engine: int, engines: int) -> "EngineConfig":
        """Of the engine of this number, counted from 0. Raises `ConfigError` if what differs between them is not said
        of all.
        """
        priced, kv_events = self.priced.for_engine(engine, engines), self.kv_events.for_engine(engine, engines)
        return replace(self, priced=priced, kv_events=kv_events, engines=engines)


def check_block_size(size: int) -> None:
    """Raise `ConfigError` for KV blocks of a size that the kernels do not take."""
    if size & (size - 1) or size > 256:
        raise ConfigError(f"block_size must be a power of two up to 256, got {size}")
