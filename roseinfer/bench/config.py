"""The options of the benchmarks, as frozen dataclasses like all others."""

from dataclasses import dataclass

from roseinfer.core.config import option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """`bench latency`: batches of equal requests, one batch after the other."""

    input_len: int = option(32, "prompt tokens of each request")
    output_len: int = option(128, "tokens each request generates")
    batch_size: tuple[int, ...] = option((), "requests at once; may be given several times (default: 8)")
    num_iters_warmup: int = option(3, "batches that do not count")
    num_iters: int = option(10, "batches that count")
    http: bool = option(False, "measure a server over HTTP too (needs the bench extra)")
    peer: bool = option(False, "measure transformers on the same work too (needs the package)")
    json: str | None = option(None, "write the result to this file", metavar="FILE")

    def __post_init__(self) -> None:
        _check_positive(self, "input_len", "output_len", "num_iters")
        if self.num_iters_warmup < 0 or any(size < 1 for size in self.batch_size):
            raise ConfigError("num_iters_warmup must not be negative, and batch_size must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """`bench throughput`: all requests at once, as many in a step as the engine takes."""

    input_len: int = option(1024, "prompt tokens of each request")
    output_len: int = option(128, "tokens each request generates")
    num_prompts: int = option(256, "requests")
    json: str | None = option(None, "write the result to this file", metavar="FILE")

    def __post_init__(self) -> None:
        _check_positive(self, "input_len", "output_len", "num_prompts")


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be positive, got {getattr(config, name)}")
