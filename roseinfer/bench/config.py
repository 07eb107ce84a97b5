"""Options of `bench latency`, `throughput`, `streaming` and `serve`."""

import math
from dataclasses import dataclass

from roseinfer.core.config.option import check_positive, option, positive_numbers
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """`bench latency`: batches of equal requests, one after the other."""

    input_len: int = option(32, "prompt tokens of each request")
    output_len: int = option(128, "tokens each request generates")
    batch_size: tuple[int, ...] = option((), "concurrent requests; may be repeated (default: 8)")
    num_iters_warmup: int = option(3, "uncounted warm-up batches")
    num_iters: int = option(10, "counted batches")
    http: bool = option(False, "measure a server over HTTP too (needs the bench extra)")
    json: str | None = option(None, "write the result to this file", metavar="FILE", written=True)

    def __post_init__(self) -> None:
        check_positive(self, "input_len", "output_len", "num_iters")
        if self.num_iters_warmup < 0 or any(size < 1 for size in self.batch_size):
            raise ConfigError("num_iters_warmup must not be negative, and batch_size must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """`bench throughput`: all requests at once; the engine fills each step."""

    input_len: int = option(1024, "prompt tokens of each request")
    output_len: int = option(128, "tokens each request generates")
    num_prompts: int = option(256, "requests")
    json: str | None = option(None, "write the result to this file", metavar="FILE", written=True)

    def __post_init__(self) -> None:
        check_positive(self, "input_len", "output_len", "num_prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingConfig:
    """`bench streaming`: requests arrive one after the other, and each is read token by token.

    No run finds anything of an earlier run in the prefix cache.
    """

    hf_model_id: str | None = option(None, "another name of MODEL", metavar="MODEL")
    prompt: str = option("Hello", "text that prompts are made of")
    prompt_repeats: str = option(
        "1", "how often the prompt is repeated: one number for each request, taken in turn", metavar="N,N,..."
    )
    unique_prompts: bool = option(False, "number the prompts at their start and share no prefix between requests")
    num_requests: int = option(32, "requests of a run")
    max_new_tokens: int = option(64, "tokens each request generates at most")
    submit_interval_ms: float = option(0.0, "milliseconds between arrivals; 0 = all at once")
    submit_schedule: str = option(
        "absolute",
        "absolute: request i is due i intervals after the first; relative: an interval after the previous was added",
        choices=("absolute", "relative"),
    )
    stop_on_eos: bool = option(True, "end a request at the model's end token")
    pretok: bool = option(False, "tokenise all prompts before the first arrives")
    tokenize_workers: int = option(0, "threads that tokenise; 0 = the event loop tokenises")
    stream_interval: int = option(1, "tokens that a reader takes at a time, after the first")
    paged_attn: bool = option(True, "attention over KV blocks; cannot be turned off")
    cuda_graph: bool = option(False, "not supported yet")
    nvtx: bool = option(False, "mark the phases of each run for a profiler (needs CUDA)")
    warmup_runs: int = option(1, "uncounted warm-up runs")
    repeat_runs: int = option(1, "counted runs")
    compare: str | None = option(
        None, "alternate runs of two values of one option; 'default' = option not given", metavar="OPTION=A,B"
    )
    json: str | None = option(None, "write the result to this file", metavar="FILE", written=True)
    plot: str | None = option(
        None, "draw the latency distributions (needs matplotlib)", metavar="FILE.png", written=True
    )

    def __post_init__(self) -> None:
        check_positive(self, "num_requests", "max_new_tokens", "stream_interval", "repeat_runs")
        _check_not_negative(self, "submit_interval_ms", "tokenize_workers", "warmup_runs")
        if self.submit_schedule not in ("absolute", "relative"):
            raise ConfigError(f"submit_schedule must be absolute or relative, got {self.submit_schedule!r}")
        if not self.prompt:
            raise ConfigError("prompt must not be empty")
        if self.cuda_graph:
            raise ConfigError("cuda_graph: this engine has no CUDA graphs yet")
        if not self.paged_attn:
            raise ConfigError("paged_attn cannot be turned off: this engine has no other attention")
        parse_repeats(self.prompt_repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoopConfig:
    """`bench serve`: requests are sent when they are due, whether or not the server keeps up.

    Prompts are random token ids. Other options draw other prompts, so that no run finds the prefix cache of another
    one. The same options and seed draw the same prompts.
    """

    url: str = option("http://127.0.0.1:8000", "address of an OpenAI-compatible server", aliases=("base_url",))
    model: str | None = option(None, "model to ask for; default: the first that the server lists", metavar="NAME")
    workload: str = option(
        "burst",
        "arrivals: all at once, Poisson, gamma (see burstiness), evenly spaced (default: gamma, without a rate burst)",
        choices=("burst", "poisson", "gamma", "uniform"),
    )
    num: int = option(128, "requests (default: 1000; of ids 128)", aliases=("num_prompts",))
    rate: float = option(
        10.0, "arrivals per second (default: inf = all at once; of workloads but burst 10)", aliases=("request_rate",)
    )
    burstiness: float = option(1.0, "gamma: shape of the gaps' distribution; 1 = Poisson, less = burstier")
    in_len: int = option(128, "prompt tokens; with --in-min the longest prompt", aliases=("input_len",))
    in_min: int = option(0, "shortest prompt, lengths being uniform; 0 = all have --in-len", aliases=("input_len_min",))
    out_len: int = option(32, "tokens to generate; with --out-min the most", aliases=("output_len",))
    out_min: int = option(
        0, "fewest tokens to generate, numbers being uniform; 0 = all generate --out-len", aliases=("output_len_min",)
    )
    cycle: str | None = option(None, "prompt lengths taken in turn, instead of --in-len", metavar="N,N,...")
    shared_prefix: int = option(0, "length of the prefix that all prompts share")
    same_prompt: bool = option(False, "send the first request's prompt with all requests")
    vocab: int = option(30_000, "token ids are drawn from [10, vocab)")
    temperature: float | None = option(None, "temperature of every request (default: the server's; ids: 0 = greedy)")
    schema_share: float = option(0.0, "share of requests with a JSON schema, which no output can complete", metavar="S")
    slo_classes: str | None = option(
        None,
        "draw a class of latency objectives for each request: JSON file, or a server's classes.toml",
        metavar="FILE",
    )
    send_objectives: bool = option(True, "send objectives to the server; off: the same load without them")
    api_key: str | None = option(None, "API key of every request (default: $OPENAI_API_KEY)", metavar="KEY")
    procs: int = option(
        4,
        "client processes that share the requests, so that the client is not the limit "
        "(default: 4; 1 with --max-concurrency or --probe-request-rate)",
    )
    seed: int = option(0, "seed of arrivals, lengths and prompts")
    timeout: float = option(300.0, "seconds after which a request fails")
    json: str | None = option(None, "write the result to this file", metavar="FILE", written=True)
    label: str = option("", "name stored with the result")

    def __post_init__(self) -> None:
        check_positive(self, "num", "rate", "burstiness", "in_len", "out_len", "procs", "timeout")
        _check_not_negative(self, "in_min", "out_min", "shared_prefix")
        if self.in_min > self.in_len or self.out_min > self.out_len:
            raise ConfigError("in_min and out_min must not exceed in_len and out_len")
        if not 0 <= self.schema_share <= 1:
            raise ConfigError(f"schema_share must be between 0 and 1, got {self.schema_share}")
        if self.vocab <= 10:
            raise ConfigError(f"vocab must be above 10, got {self.vocab}")
        if self.workload not in ("burst", "poisson", "gamma", "uniform"):
            raise ConfigError(f"workload must be burst, poisson, gamma or uniform, got {self.workload!r}")
        if self.cycle is not None:
            parse_numbers("cycle", self.cycle)


def parse_repeats(text: str) -> tuple[int, ...]:
    """Parse `"512,1,1,1"` to (512, 1, 1, 1). Raise `ConfigError` if it is invalid."""
    return parse_numbers("prompt_repeats", text)


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the positive numbers of an option's text. Raise `ConfigError` that names the option."""
    numbers = positive_numbers(name, text, int)
    if not numbers:
        raise ConfigError(f"{name} must be positive numbers with commas between them, got {text!r}")
    return numbers


def _check_not_negative(config: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"{name} must be 0 or positive, got {getattr(config, name)}")
