"""Every option of roseinfer, once. The command line is generated from these frozen dataclasses, and so is `LLM(...)`.

`option()` attaches what the command line needs (help text, choices); the field's default is the option's default.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from itertools import pairwise
from math import isfinite
from typing import Any

from roseinfer.core.errors import ConfigError

DEFAULT_POLICY = "slack"
DEFAULT_ROUTER = "pace"
PRICED = "priced"  # the device of an engine without a model
SEATS = 256  # unless the device is large enough for more


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
    spaced: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option. `aliases` are other names for its flag. `spaced`: several
    values may follow the flag once, with spaces between them. `secret`: who shows the dataclass does not show it.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "aliases": aliases, "spaced": spaced}
    return field(default=default, metadata=metadata, repr=not secret)


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
    max_model_len: int | None = option(None, "context in tokens; default: the model's, as far as the cache holds it")
    tokenizer: str | None = option(None, "folder, GGUF file or id of another tokenizer", metavar="MODEL")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    download_dir: str | None = option(None, "where downloads are kept; default: the hub's cache", metavar="DIR")
    attention_backend: str = option(
        "auto",
        "auto = triton on a GPU, torch on a CPU",
        choices=("auto", "triton", "flashinfer", "torch"),
    )
    enforce_eager: bool = option(False, "launch the kernels of a step one by one instead of replaying CUDA graphs")
    seed: int = option(0, "seeds dummy weights and the requests that bring no seed")
    threads: int | None = option(None, "CPU threads of the engine; default: all cores")

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "max_model_len", "threads")
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

    def of_engine(self, engine: int, engines: int) -> "PricedConfig":
        """What the engine of this number is to be given. Raises `ConfigError` unless there are as many factors."""
        factors = self.slow_list
        if not factors:
            return self
        if len(factors) != engines:
            raise ConfigError(f"slow: {len(factors)} factors were given for {engines} engines")
        return replace(self, slow=str(factors[engine]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Who is told which KV blocks an engine holds. `rank`: the number of the engine, which is added to its ports."""

    kv_events_endpoint: str | None = option(
        None, "publish by ZeroMQ which KV blocks the engine holds; engine N at PORT + N", metavar="tcp://ADDRESS:PORT"
    )
    kv_events_topic: str | None = option(
        None, "topic of the KV events; default: kv@ADDRESS:PORT@MODEL, of their endpoint", metavar="TOPIC"
    )
    kv_events_replay_endpoint: str | None = option(
        None, "where KV events that were missed can be asked for; engine N at PORT + N", metavar="tcp://ADDRESS:PORT"
    )
    kv_events_buffer_steps: int = option(10000, "steps whose KV events can be asked for")
    rank: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "kv_events_buffer_steps")
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            _zmq_address(name, getattr(self, name), self.rank)
        given = next((f.name for f in fields(self) if f.name != "rank" and getattr(self, f.name) != f.default), None)
        if given is not None and self.kv_events_endpoint is None:
            raise ConfigError(f"{given} needs kv_events_endpoint")

    @property
    def endpoint(self) -> str | None:
        """Of the engine `rank`."""
        return _zmq_address("kv_events_endpoint", self.kv_events_endpoint, self.rank)

    @property
    def replay_endpoint(self) -> str | None:
        """Of the engine `rank`."""
        return _zmq_address("kv_events_replay_endpoint", self.kv_events_replay_endpoint, self.rank)

    def of_engine(self, engine: int, engines: int) -> "KvEventsConfig":
        """Of the engine of this number. Raises `ConfigError` if ports of `engines` engines are the same."""
        ports = [_zmq_port(each) for each in (self.kv_events_endpoint, self.kv_events_replay_endpoint) if each]
        if len(ports) == 2 and abs(ports[0] - ports[1]) < engines:
            raise ConfigError(f"kv_events_replay_endpoint: {engines} engines take {engines} ports from each endpoint")
        return replace(self, rank=engine)


def _zmq_address(name: str, endpoint: str | None, rank: int) -> str | None:
    """An endpoint with its port moved by `rank`. Raises `ConfigError` unless it is one that can be bound."""
    if endpoint is None:
        return None
    head, _, port = endpoint.rpartition(":")
    host = head.removeprefix("tcp://")
    try:
        ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        fits = head != host and port.isascii() and port.isdigit() and int(port) > 0 and int(port) + rank < 2**16
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"{name} must be tcp://ADDRESS:PORT with an IP address of this host, got {endpoint!r}")
    return f"{head}:{int(port) + rank}"


def _zmq_port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


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

    def of_engine(self, engine: int, engines: int) -> "EngineConfig":
        """Of the engine of this number, counted from 0. Raises `ConfigError` if what differs between them is not said
        of all.
        """
        priced, kv_events = self.priced.of_engine(engine, engines), self.kv_events.of_engine(engine, engines)
        return replace(self, priced=priced, kv_events=kv_events, engines=engines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """How many engines a server has, where they run, how requests are spread over them, and when one is given up.

    With a `router` of None and several engines it is `DEFAULT_ROUTER`; who makes one knows the names.
    """

    replicas: int | None = option(
        None, "engines, each with all of the model; default: one for each of --devices, without them one"
    )
    devices: str | None = option(
        None, "GPUs of the engines, as 0,1; default: the first ones, one for each engine", metavar="LIST"
    )
    router: str | None = option(
        None, f"how requests are spread over several engines (default: {DEFAULT_ROUTER})", metavar="NAME"
    )
    engine_timeout: float = option(
        10.0, "seconds without a sign of life after which another engine goes on with an engine's requests"
    )
    drain_timeout: float = option(
        30.0, "seconds in which the requests of an engine that is restarted on purpose may finish where they are"
    )
    engines: str | None = option(
        None, "engines on other hosts instead, which `roseinfer engine` keeps there: a,b,...", metavar="HOST:PORT,..."
    )
    secret_file: str | None = option(None, "a file with the secret that engines on other hosts ask for", metavar="FILE")

    def __post_init__(self) -> None:
        check_positive(self, "replicas", "engine_timeout")
        if self.engines is not None:
            self._check_engines()
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must not be negative, got {self.drain_timeout}")
        listed = self.device_list
        if not all(name.isdecimal() for name in listed):
            raise ConfigError(f"devices must be numbers of GPUs, as 0,1, got {self.devices!r}")
        if len(set(map(int, listed))) < len(listed):
            raise ConfigError(f"devices: a GPU holds one engine, {self.devices} names one twice")
        if listed and self.replicas is not None and self.replicas != len(listed):
            raise ConfigError(f"replicas is {self.replicas}, but devices names {len(listed)}: {self.devices}")
        if self.router is not None and self.count == 1:
            raise ConfigError("router: there is nothing to choose with one engine; give replicas or devices")

    def _check_engines(self) -> None:
        for name in ("replicas", "devices"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: the engines that are named with engines are others'; it is for our own")
        if not all(self.engine_list) or len(set(self.engine_list)) < len(self.engine_list):
            raise ConfigError(f"engines must be different ones, each HOST:PORT, got {self.engines!r}")
        if self.secret_file is None:
            raise ConfigError("engines: others' engines ask for a secret: give a secret_file")

    @property
    def engine_list(self) -> tuple[str, ...]:
        """Where the engines are that others keep; empty if we have our own."""
        return () if self.engines is None else tuple(name.strip() for name in self.engines.split(","))

    @property
    def device_list(self) -> tuple[str, ...]:
        """The numbers of the GPUs that were named, one for each engine; empty if none were."""
        return () if self.devices is None else tuple(name.strip() for name in self.devices.split(","))

    @property
    def count(self) -> int:
        """How many engines there are to be."""
        return self.replicas or len(self.device_list) or len(self.engine_list) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperConfig:
    """Keeping one engine for servers on other hosts. `bind` and `secret_file` must be given."""

    bind: str | None = option(
        None, "the one address to listen on; port 0 = any free one", aliases=("listen",), metavar="HOST:PORT"
    )
    secret_file: str | None = option(
        None, "a file with the secret that servers must know, at least 16 bytes", metavar="FILE"
    )
    devices: str | None = option(None, "the GPU of the engine, as 2; default: the first one", metavar="GPU")
    engine_timeout: float = option(
        10.0, "seconds without a sign of life after which servers are told to go on with other engines"
    )
    stall_timeout: float = option(60.0, "seconds without a sign of life after which the engine is killed")
    drain_timeout: float = option(
        30.0, "seconds in which requests may finish here after SIGTERM, and before a restart on purpose (SIGHUP)"
    )
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "how to write log lines: for people, or as JSON", choices=("text", "json"))

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "stall_timeout")
        if self.replicas.count > 1:
            raise ConfigError(f"devices: an engine has one GPU, got {self.devices}")

    @property
    def replicas(self) -> ReplicasConfig:
        """The engine as one of a server's. Raises `ConfigError`."""
        return ReplicasConfig(
            devices=self.devices, engine_timeout=self.engine_timeout, drain_timeout=self.drain_timeout
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 = any free one")
    api_workers: int | None = option(None, "processes that answer requests; default: 1 to 4, by the cores there are")
    api_key: tuple[str, ...] = option(
        (), "a key that requests must carry; may be given several times", metavar="KEY", secret=True
    )
    api_key_file: str | None = option(None, "a file with such keys, one in a line", metavar="FILE")
    served_model_name: tuple[str, ...] = option((), "names to serve the model under; default: MODEL", metavar="NAME")
    chat_template: str | None = option(None, "file with a chat template instead of the model's", metavar="FILE")
    tool_call_parser: str | None = option(
        None, "how the model writes tool calls, 'none' = not at all; default: as its chat template says", metavar="NAME"
    )
    reasoning: bool = option(True, "tell what the model thinks apart from its answer, if its chat template has marks")
    slo_classes: str | None = option(
        None, "named classes of latency objectives, and who gets which by default", metavar="FILE"
    )
    length_predictor: str | None = option(
        None, "predict output lengths with this file of `roseinfer train-predictor`", metavar="FILE"
    )
    allowed_origins: tuple[str, ...] = option((), "CORS origins", metavar="ORIGIN")
    max_num_queued_reqs: int = option(1024, "prompts in the server, running ones included; more get a 503")
    max_body_bytes: int = option(8 * 2**20, "largest request body; more gets a 413")
    max_prompts: int = option(1024, "prompts of one completion request")
    max_choices: int = option(128, "largest n")
    max_logprobs: int = option(20, "largest logprobs and top_logprobs; -1 = no limit")
    max_stop_strings: int = option(64, "stop strings of one request")
    max_body_readers: int = option(256, "request bodies that a process reads at a time; more get a 503")
    body_timeout: float = option(60.0, "seconds in which a request's body must arrive")
    write_timeout: float = option(30.0, "seconds after which a client that takes nothing of its answer is cut off")
    sse_keep_alive_interval: float = option(15.0, "seconds between comments on an idle stream; 0 = none")
    shutdown_timeout: float = option(30.0, "seconds in which running requests may finish after SIGTERM")
    stall_timeout: float = option(60.0, "seconds without an engine heartbeat after which /health says 503")
    worker_timeout: float = option(30.0, "seconds without a heartbeat after which an API worker is killed and replaced")
    enable_log_requests: bool = option(False, "log the start of each request too")
    otlp_endpoint: str | None = option(
        None, "send traces to this collector, for example http://127.0.0.1:4318 (OTLP over HTTP)", metavar="URL"
    )
    enable_docs: bool = option(True, "serve /docs and /openapi.json")
    console: bool = option(True, "serve a console for browsers at /")
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "how to write log lines: for people, or as JSON", choices=("text", "json"))

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "max_num_queued_reqs", "max_body_bytes", "max_prompts", "max_choices", "stall_timeout")
        check_positive(self, "api_workers", "worker_timeout", "max_body_readers", "body_timeout", "write_timeout")
        for name in ("shutdown_timeout", "sse_keep_alive_interval", "max_stop_strings"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs must be -1 (no limit) or more, got {self.max_logprobs}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be within [0, 65535], got {self.port}")
        check_api_keys(self.api_key, "api_key")
        if not all(name.strip() for name in self.served_model_name):
            raise ConfigError("served_model_name: a name must not be empty")


def check_api_keys(keys: Iterable[str], source: str) -> None:
    """Raise `ConfigError` naming `source`, but no key, if one of `keys` is empty or could not stand in a header."""
    for key in keys:
        if not key.strip():
            raise ConfigError(f"{source}: a key must not be empty")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"{source}: a key must consist of visible ASCII characters")


def check_choices(config: Any) -> None:
    """Raise `ConfigError` naming the first option whose value is not among its choices."""
    for f in fields(config):
        allowed = f.metadata.get("choices")
        if not allowed or (f.default is None and getattr(config, f.name) is None):
            continue
        if getattr(config, f.name) not in allowed:
            raise ConfigError(f"{f.name} must be one of {', '.join(allowed)}, got {getattr(config, f.name)!r}")


def check_block_size(size: int) -> None:
    """Raise `ConfigError` for KV blocks of a size that the kernels do not take."""
    if size & (size - 1) or size > 256:
        raise ConfigError(f"block_size must be a power of two up to 256, got {size}")


def positive_numbers(name: str, text: str | None) -> tuple[float, ...]:
    """Those of a list with commas. Raises `ConfigError` for anything else."""
    try:
        numbers = tuple(float(part) for part in (text or "").split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if any(not (isfinite(number) and number > 0) for number in numbers):
        raise ConfigError(f"{name} must be positive, got {text}")
    return numbers


def check_positive(config: Any, *names: str) -> None:
    """Raise `ConfigError` naming the first of these options that is given and not positive."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive, got {value}")
