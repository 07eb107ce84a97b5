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
    """What prompts are made of, and how many tokens are asked for."""

    dataset_name: str | None = option(
        None,
        "where prompts come from (default: random; ids = random token ids, if one of the options of ids is given)",
        choices=DATASETS,
    )
    dataset_path: str | None = option(None, "file of sharegpt (JSON), custom or timed_trace (JSONL)", metavar="FILE")
    tokenizer: str | None = option(
        None, "counts and makes texts: folder or hub id (default: the server's /tokenize)", metavar="MODEL"
    )
    random_input_len: int = option(1024, "random: prompt tokens")
    random_output_len: int = option(128, "random: tokens to generate")
    random_range_ratio: str = option(
        "0.0", 'random: lengths are uniform in [1 - r, 1 + r] times these; or {"input": r, "output": r}', metavar="R"
    )
    random_prefix_len: int = option(0, "random: tokens that all prompts begin with, beside their length")
    prefix_repetition_prefix_len: int = option(256, "prefix_repetition: tokens of a prefix")
    prefix_repetition_suffix_len: int = option(256, "prefix_repetition: tokens of each prompt's own")
    prefix_repetition_num_prefixes: int = option(10, "prefix_repetition: prefixes, each with as many prompts")
    prefix_repetition_output_len: int = option(128, "prefix_repetition: tokens to generate")
    sharegpt_output_len: int | None = option(None, "sharegpt: tokens to generate; default: the answer's")
    custom_output_len: int = option(256, "custom: tokens to generate; -1 = each line's output_tokens")
    skip_chat_template: bool = option(False, "custom: send prompts as they are, not as a user's message")
    timed_trace_chunk_hash_size: int = option(16, "timed_trace: tokens that one of hash_ids stands for")
    timed_trace_sec_multiplier: float = option(1.0, "timed_trace: seconds of a timestamp's unit")
    self_timed: bool | None = option(None, "timed_trace: requests are due at their timestamps (default: on)")
    disable_shuffle: bool = option(False, "take a file's lines in their order")
    oversample: bool = option(True, "repeat prompts of a file that has fewer than are asked for")

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
        """Range ratios of input and output. Raises `ConfigError`."""
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
    """How requests are sent, and what they carry beside their prompts."""

    backend: str = option("openai", "completions or chats; vllm = openai", choices=BACKENDS)
    host: str | None = option(None, "with port, instead of url", metavar="HOST")
    port: int | None = option(None, "with host, instead of url")
    endpoint: str | None = option(None, "default: /v1/completions, of openai-chat /v1/chat/completions", metavar="PATH")
    served_model_name: str | None = option(None, "model to ask for, if not by the name of model", metavar="NAME")
    max_concurrency: int | None = option(None, "requests in flight at most; those that are due wait in the client")
    ramp_up_strategy: str | None = option(None, "raise the rate from start to end", choices=("linear", "exponential"))
    ramp_up_start_rps: int | None = option(None, "requests a second at first")
    ramp_up_end_rps: int | None = option(None, "requests a second at last")
    num_warmups: int = option(0, "requests that do not count, before all others")
    ready_check_timeout_sec: float = option(0.0, "wait so long for the server to answer a first request; 0 = no check")
    probe_request_rate: float = option(0.0, "requests of one token a second beside the load, timed apart; 0 = none")
    request_id_prefix: str | None = option(None, "of x-request-id (default: bench-<8 hex>-)", metavar="TEXT")
    header: tuple[str, ...] = option((), "sent with every request", metavar="KEY=VALUE", spaced=True)
    extra_body: str | None = option(None, "fields for every request, which beat all others", metavar="JSON")
    logprobs: int | None = option(None, "logprobs for each token")
    ignore_eos: bool = option(False, "end tokens end nothing (always so for ids, random and timed_trace)")
    top_p: float | None = option(None, "default: the server's")
    top_k: int | None = option(None, "default: the server's")
    min_p: float | None = option(None, "default: the server's")
    frequency_penalty: float | None = option(None, "default: the server's")
    presence_penalty: float | None = option(None, "default: the server's")
    repetition_penalty: float | None = option(None, "default: 1")
    token_itl: bool = option(
        False, "ITL of every token, not of every chunk: asks the server to count them (continuous_usage_stats)"
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
            raise ConfigError("ramp_up_strategy, ramp_up_start_rps and ramp_up_end_rps go together")
        if self.ramp_up_strategy is not None:
            if start is None or end is None or not 0 <= start <= end:
                raise ConfigError("ramp_up_start_rps must be given, and must not exceed ramp_up_end_rps")
            if self.ramp_up_strategy == "exponential" and start == 0:
                raise ConfigError("ramp_up_start_rps must be positive for an exponential ramp-up")
        pairs("header", self.header)
        self.extra()

    def extra(self) -> dict[str, Any]:
        """Raises `ConfigError` if extra_body is no JSON object."""
        try:
            found = json.loads(self.extra_body) if self.extra_body else {}
        except ValueError as error:
            raise ConfigError(f"extra_body is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError("extra_body must be a JSON object")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultConfig:
    """What is reported, and where it goes."""

    percentile_metrics: str = option("ttft,tpot,itl", f"of {', '.join(METRICS)}", metavar="NAME,...")
    metric_percentiles: str = option("99", "percentiles of these metrics", metavar="P,...")
    goodput: tuple[str, ...] = option(
        (), "limits in ms that good requests keep, of ttft, tpot, e2el", metavar="NAME:MS", spaced=True
    )
    save_result: bool = option(False, "write the result as vllm bench serve does")
    save_detailed: bool = option(False, "with lengths, times, texts and errors of every request")
    append_result: bool = option(False, "append the result to the file, as one more line")
    result_dir: str | None = option(None, "folder of the result", metavar="DIR")
    result_filename: str | None = option(
        None, "name of the result's file (default: {label}-{rate}qps-{model}-{date}.json)", metavar="FILE"
    )
    metadata: tuple[str, ...] = option((), "kept with the result", metavar="KEY=VALUE", spaced=True)
    plot: str | None = option(None, "draw the latency distributions (needs matplotlib)", metavar="FILE.png")
    disable_tqdm: bool = option(False, "no effect: there is no progress bar")

    def __post_init__(self) -> None:
        unknown = [name for name in self.metrics() if name not in METRICS]
        if unknown:
            raise ConfigError(f"percentile_metrics: {unknown[0]!r} is none of {', '.join(METRICS)}")
        self.percentiles()
        self.limits()
        pairs("metadata", self.metadata)

    def metrics(self) -> list[str]:
        return self.percentile_metrics.split(",")

    def percentiles(self) -> list[float]:
        """Raises `ConfigError`."""
        try:
            found = [float(p) for p in self.metric_percentiles.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 <= p <= 100 for p in found):
            raise ConfigError(f"metric_percentiles must be numbers from 0 to 100, got {self.metric_percentiles!r}")
        return found

    def limits(self) -> dict[str, float]:
        """Name -> milliseconds. Raises `ConfigError`."""
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


def pairs(name: str, given: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE -> {KEY: VALUE}. Raises `ConfigError` naming the option."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{name} must be KEY=VALUE, got {text!r}")
        found[key.strip()] = value.strip()
    return found


def environment_key() -> str | None:
    """The key that clients of the OpenAI API find there."""
    return os.environ.get("OPENAI_API_KEY") or None
