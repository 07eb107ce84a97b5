"""Options of `bench serve` that `vllm bench serve` has too, by the same names."""

import json
import math
import os
from dataclasses import dataclass
from typing import Any

from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError

IDS = "ids"
DATASETS = (IDS, "random", "prefix_repetition", "sharegpt", "custom", "timed_trace")
BACKENDS = ("openai", "openai-chat", "vllm")
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
GOODPUT = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Source of prompts and lengths of outputs."""

    dataset_name: str | None = option(
        None,
        "where prompts come from (default: random; ids = random token ids, if one of the options of ids is given)",
        choices=DATASETS,
    )
    dataset_path: str | None = option(None, "file of sharegpt (JSON), custom or timed_trace (JSONL)", metavar="FILE")
    tokenizer: str | None = option(
        None, "tokenizer for prompts: folder or hub id (default: the server's /tokenize)", metavar="MODEL"
    )
    random_input_len: int = option(1024, "random: prompt tokens")
    random_output_len: int = option(128, "random: tokens to generate")
    random_range_ratio: str = option(
        "0.0", 'random: lengths are uniform in [1 - r, 1 + r] times these; or {"input": r, "output": r}', metavar="R"
    )
    random_prefix_len: int = option(0, "random: tokens of a prefix that all prompts share, on top of their length")
    prefix_repetition_prefix_len: int = option(256, "prefix_repetition: tokens of a prefix")
    prefix_repetition_suffix_len: int = option(256, "prefix_repetition: tokens after the prefix")
    prefix_repetition_num_prefixes: int = option(
        10, "prefix_repetition: number of prefixes, each with the same number of prompts"
    )
    prefix_repetition_output_len: int = option(128, "prefix_repetition: tokens to generate")
    sharegpt_output_len: int | None = option(None, "sharegpt: tokens to generate; default: the answer's")
    custom_output_len: int = option(256, "custom: tokens to generate; -1 = each line's output_tokens")
    skip_chat_template: bool = option(False, "custom: send prompts as they are, not as a user's message")
    timed_trace_chunk_hash_size: int = option(16, "timed_trace: tokens per entry of hash_ids")
    timed_trace_sec_multiplier: float = option(1.0, "timed_trace: seconds of a timestamp's unit")
    self_timed: bool | None = option(None, "timed_trace: requests are due at their timestamps (default: on)")
    disable_shuffle: bool = option(False, "use a file's lines in their order")
    oversample: bool = option(True, "repeat prompts of a file with too few")

    def __post_init__(self) -> None:
        positive = ("random_output_len", "prefix_repetition_num_prefixes", "prefix_repetition_output_len")
        check_positive(self, *positive, "timed_trace_chunk_hash_size", "timed_trace_sec_multiplier")
        lengths = ("random_input_len", "random_prefix_len")
        for name in (*lengths, "prefix_repetition_prefix_len", "prefix_repetition_suffix_len"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.custom_output_len < 1 and self.custom_output_len != -1:
            raise ConfigError(f"custom_output_len must be positive or -1, got {self.custom_output_len}")
        if self.dataset_name in ("sharegpt", "custom", "timed_trace") and self.dataset_path is None:
            raise ConfigError(f"dataset_name {self.dataset_name} needs dataset_path")
        if self.dataset_name in (IDS, "random", "prefix_repetition") and self.dataset_path is not None:
            raise ConfigError(f"dataset_name {self.dataset_name} takes no dataset_path")
        if self.self_timed is not None and self.dataset_name != "timed_trace":
            raise ConfigError("self_timed is for dataset_name timed_trace only")
        self.ratios()

    def ratios(self) -> tuple[float, float]:
        """Return range ratios of input and output. Raise `ConfigError`."""
        try:
            given = json.loads(self.random_range_ratio)
            found = (given.get("input", 0.0), given.get("output", 0.0)) if isinstance(given, dict) else (given, given)
            ratios = (float(found[0]), float(found[1]))
        except (ValueError, TypeError):
            ratios = (math.nan, math.nan)
        if not all(0 <= ratio < 1 for ratio in ratios):
            raise ConfigError(f"random_range_ratio must be in [0, 1), got {self.random_range_ratio!r}")
        return ratios


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Options of sending requests, and of their fields other than the prompt."""

    backend: str = option("openai", "completions or chats; vllm = openai", choices=BACKENDS)
    host: str | None = option(None, "with port, instead of url", metavar="HOST")
    port: int | None = option(None, "with host, instead of url")
    endpoint: str | None = option(None, "default: /v1/completions, of openai-chat /v1/chat/completions", metavar="PATH")
    served_model_name: str | None = option(None, "model name to send, if it differs from model", metavar="NAME")
    max_concurrency: int | None = option(None, "limit of requests in flight; requests that are due wait in the client")
    ramp_up_strategy: str | None = option(None, "raise the rate from start to end", choices=("linear", "exponential"))
    ramp_up_start_rps: int | None = option(None, "requests a second at first")
    ramp_up_end_rps: int | None = option(None, "requests a second at last")
    num_warmups: int = option(0, "uncounted requests before the load")
    ready_check_timeout_sec: float = option(0.0, "seconds to wait for a first answer of the server; 0 = no check")
    probe_request_rate: float = option(
        0.0, "one-token requests a second during the load, reported separately; 0 = none"
    )
    request_id_prefix: str | None = option(None, "prefix of x-request-id (default: bench-<8 hex>-)", metavar="TEXT")
    header: tuple[str, ...] = option((), "header of every request", metavar="KEY=VALUE", spaced=True)
    extra_body: str | None = option(None, "fields of every request, which override all others", metavar="JSON")
    logprobs: int | None = option(None, "logprobs for each token")
    ignore_eos: bool = option(False, "generate past end tokens (always on for ids, random and timed_trace)")
    top_p: float | None = option(None, "default: the server's")
    top_k: int | None = option(None, "default: the server's")
    min_p: float | None = option(None, "default: the server's")
    frequency_penalty: float | None = option(None, "default: the server's")
    presence_penalty: float | None = option(None, "default: the server's")
    repetition_penalty: float | None = option(None, "default: 1")
    token_itl: bool = option(
        False, "report ITL per token, not per chunk: asks the server for counts (continuous_usage_stats)"
    )

    def __post_init__(self) -> None:
        for name in ("max_concurrency", "ramp_up_end_rps"):
            if getattr(self, name) is not None:
                check_positive(self, name)
        for name in ("num_warmups", "ready_check_timeout_sec", "probe_request_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be 0 or positive, got {getattr(self, name)}")
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if (self.ramp_up_strategy is None) != (start is None and end is None):
            raise ConfigError("ramp_up_strategy, ramp_up_start_rps and ramp_up_end_rps must be given together")
        if self.ramp_up_strategy is not None:
            if start is None or end is None or not 0 <= start <= end:
                raise ConfigError("ramp_up_start_rps must be given, and must not exceed ramp_up_end_rps")
            if self.ramp_up_strategy == "exponential" and start == 0:
                raise ConfigError("ramp_up_start_rps must be positive for an exponential ramp-up")
        parse_pairs("header", self.header)
        self.extra()

    def extra(self) -> dict[str, Any]:
        """Return the object in extra_body. Raise `ConfigError` if it is not a JSON object."""
        try:
            found = json.loads(self.extra_body) if self.extra_body else {}
        except ValueError as error:
            raise ConfigError(f"extra_body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError("extra_body must be a JSON object")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultConfig:
    """Options of the report and its files."""

    percentile_metrics: str = option("ttft,tpot,itl", f"metrics to report: {', '.join(METRICS)}", metavar="NAME,...")
    metric_percentiles: str = option("99", "percentiles of these metrics", metavar="P,...")
    goodput: tuple[str, ...] = option(
        (), "latency limits of good requests: ttft, tpot, e2el in ms", metavar="NAME:MS", spaced=True
    )
    save_result: bool = option(False, "write the result in the format of vllm bench serve")
    save_detailed: bool = option(False, "include lengths, times, texts and errors of every request")
    append_result: bool = option(False, "append the result to the file, as one more line")
    result_dir: str | None = option(None, "folder of the result", metavar="DIR")
    result_filename: str | None = option(
        None, "name of the result's file (default: {label}-{rate}qps-{model}-{date}.json)", metavar="FILE"
    )
    metadata: tuple[str, ...] = option((), "stored with the result", metavar="KEY=VALUE", spaced=True)
    plot: str | None = option(
        None, "draw the latency distributions (needs matplotlib)", metavar="FILE.png", written=True
    )
    disable_tqdm: bool = option(False, "no effect: there is no progress bar")

    @property
    def writes(self) -> bool:
        """True if the result is written to a file."""
        return self.save_result or self.append_result

    def __post_init__(self) -> None:
        unknown = [name for name in self.metrics() if name not in METRICS]
        if unknown:
            raise ConfigError(f"percentile_metrics: unknown metric {unknown[0]!r}; choose from {', '.join(METRICS)}")
        self.percentiles()
        self.limits()
        parse_pairs("metadata", self.metadata)

    def metrics(self) -> list[str]:
        return self.percentile_metrics.split(",")

    def percentiles(self) -> list[float]:
        """Return the percentiles to report. Raise `ConfigError`."""
        try:
            found = [float(p) for p in self.metric_percentiles.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 <= p <= 100 for p in found):
            raise ConfigError(f"metric_percentiles must be numbers from 0 to 100, got {self.metric_percentiles!r}")
        return found

    def limits(self) -> dict[str, float]:
        """Return the limits of good requests, name -> milliseconds. Raise `ConfigError`."""
        found: dict[str, float] = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in GOODPUT or not limit >= 0:
                raise ConfigError(f"goodput must be NAME:MS of {', '.join(GOODPUT)}, MS not negative, got {text!r}")
            found[name] = limit
        return found


def parse_pairs(name: str, given: tuple[str, ...]) -> dict[str, str]:
    """Parse KEY=VALUE options to {KEY: VALUE}. Raise `ConfigError` that names the option."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{name} must be KEY=VALUE, got {text!r}")
        found[key.strip()] = value.strip()
    return found


def environment_api_key() -> str | None:
    """Return the key in OPENAI_API_KEY, which clients of the OpenAI API use, or None."""
    return os.environ.get("OPENAI_API_KEY") or None
