"""The options of `roseinfer simulate`."""

from dataclasses import dataclass

from roseinfer.core.config import check_positive, option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Random requests; lengths are uniform between the bounds."""

    num_requests: int = option(256, "requests")
    request_rate: float = option(0.0, "arrivals per second (Poisson); 0 = all at once")
    input_len_min: int = option(16, "shortest prompt in tokens")
    input_len: int = option(512, "longest prompt in tokens")
    output_len_min: int = option(16, "shortest output in tokens")
    output_len: int = option(128, "longest output in tokens")
    seed: int = option(0, "seeds arrivals, lengths and prompts")
    json: str | None = option(None, "write the result to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_positive(self, "num_requests", "input_len_min", "output_len_min")
        if self.request_rate < 0:
            raise ConfigError(f"request_rate must not be negative, got {self.request_rate}")
        if self.input_len < self.input_len_min or self.output_len < self.output_len_min:
            raise ConfigError("input_len and output_len must not be below their minima")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """What a step costs: step_ms + token_us for each token computed + context_ns for each token attended to."""

    step_ms: float = option(5.0, "milliseconds of any step: reading the weights, launching")
    token_us: float = option(20.0, "microseconds per token computed")
    context_ns: float = option(20.0, "nanoseconds per token of K/V that a computed token attends to")
    max_model_len: int = option(4096, "context in tokens")
    num_kv_blocks: int = option(8192, "KV blocks")
    block_size: int = option(16, "tokens of a KV block, a power of two up to 256")
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts seen before")

    def __post_init__(self) -> None:
        for name in ("step_ms", "token_us", "context_ns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.step_ms == self.token_us == 0:
            raise ConfigError("step_ms and token_us must not both be 0: time would stand still")
        check_positive(self, "max_model_len", "num_kv_blocks", "block_size")
