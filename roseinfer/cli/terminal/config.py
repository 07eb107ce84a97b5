"""Options of the terminal commands, as frozen dataclasses."""

from dataclasses import dataclass
from math import inf

from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Running server to connect to."""

    url: str | None = option(
        None, "URL of a server, for example http://127.0.0.1:8000; default: start one here", metavar="URL"
    )
    model_name: str | None = option(None, "name of the server's model; default: the first", metavar="NAME")
    api_key: str | None = option(None, "API key of the server; default: ROSEINFER_API_KEY", metavar="KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskConfig:
    """Sampling options and objectives of every answer. `sampling.model_of` has the values of those not given."""

    max_tokens: int | None = option(None, "maximum number of tokens of an answer")
    temperature: float | None = option(None, "0 = greedy; default: the model's, else 0.7")
    top_p: float | None = option(
        None, "sample among the most likely tokens with this total probability; default: the model's, else 0.95"
    )
    slo: str | None = option(None, "latency objectives, for example 'ttft=200ms tpot=30ms'", metavar="WORDS")
    stats: bool | None = option(None, "print tokens and times after each answer; default: on a terminal")

    def __post_init__(self) -> None:
        check_positive(self, "max_tokens")
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise ConfigError(f"temperature must be within [0, 2], got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be within (0, 1], got {self.top_p}")

    @property
    def fields(self) -> dict[str, int | float]:
        """Return the given options as fields of a request."""
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Options of `chat`."""

    system_prompt: str | None = option(None, "system message", metavar="TEXT")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """Options of `top`."""

    url: str = option("http://127.0.0.1:8000", "URL of a server with vLLM's metrics", metavar="URL")
    api_key: str | None = option(None, "API key of the server; default: ROSEINFER_API_KEY", metavar="KEY")
    interval: float = option(1.0, "seconds between two readings")
    slowest: int = option(10, "number of requests to show, the slowest of the last 200")
    once: bool = option(False, "print one view without colours and exit")
    json: bool = option(False, "with --once: as JSON")

    def __post_init__(self) -> None:
        check_positive(self, "interval", "slowest")
        if self.json and not self.once:
            raise ConfigError("--json requires --once")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Options of `demo`."""

    duration: float = option(60.0, "seconds of load; 0 = until Ctrl+C", metavar="S")
    port: int | None = option(None, "port of the server; default: 8000 if it is free, else any")
    load_seed: int = option(0, "seed of the load's requests and arrivals")

    def __post_init__(self) -> None:
        if not 0 <= self.duration < inf:
            raise ConfigError(f"duration must not be negative, got {self.duration}")
