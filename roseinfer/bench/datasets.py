"""Prompts of `bench serve` by dataset; the same options and seed give the same prompts."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from roseinfer.bench.arrivals import DatasetSample
from roseinfer.bench.codec import Codec, make_texts
from roseinfer.bench.serve_config import DatasetConfig
from roseinfer.core.errors import ConfigError, reason_of

# Limits of `vllm bench serve` for the lengths of shared conversations.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOKENS = 4, 1024, 2048
MAX_BATCH_LINES = 256


def load(config: DatasetConfig, codec: Codec, count: int, seed: int, chat: bool) -> list[DatasetSample]:
    """Return `count` samples, or fewer if the dataset has fewer. `chat`: they become messages and must be texts.

    Raise `ConfigError` if the dataset cannot be used.
    """
    assert config.dataset_name is not None
    rng = random.Random(f"{config.dataset_name} {seed}")
    samples = _LOADERS[config.dataset_name](config, codec, count, rng)
    if not samples:
        raise ConfigError(f"dataset_path: {config.dataset_path!r} holds no usable prompt")
    if config.dataset_path and config.oversample and config.dataset_name != "timed_trace":
        samples += [rng.choice(samples) for _ in range(count - len(samples))]
    if chat and any(sample.text is None for sample in samples):
        raise ConfigError(f"backend openai-chat does not support token ids (dataset {config.dataset_name!r})")
    return samples


def _random(config: DatasetConfig, codec: Codec, count: int, rng: random.Random) -> list[DatasetSample]:
    spread_in, spread_out = config.ratios()
    length = max(0, config.random_input_len - codec.added)
    prefix = rng.choices(codec.pool, k=config.random_prefix_len)
    wanted = [prefix + rng.choices(codec.pool, k=_length(rng, length, spread_in, 0)) for _ in range(count)]
    if not all(wanted):
        raise ConfigError("random_input_len is too small: some prompts would be empty")
    outputs = [_length(rng, config.random_output_len, spread_out, 1) for _ in range(count)]
    made = make_texts(codec, wanted, rng)
    return [DatasetSample(ids, output, text) for (text, ids), output in zip(made, outputs, strict=True)]


def _length(rng: random.Random, length: int, spread: float, least: int) -> int:
    low, high = math.floor(length * (1 - spread)), math.ceil(length * (1 + spread))
    return rng.randint(max(least, low), max(least, high))


def _prefix_repetition(config: DatasetConfig, codec: Codec, count: int, rng: random.Random) -> list[DatasetSample]:
    """Return the same number of prompts for each prefix, `count` at most."""
    each = count // config.prefix_repetition_num_prefixes
    if each == 0:
        raise ConfigError("prefix_repetition_num_prefixes must not exceed the number of prompts")
    wanted = []
    for _ in range(config.prefix_repetition_num_prefixes):
        prefix = rng.choices(codec.pool, k=config.prefix_repetition_prefix_len)
        wanted += [prefix + rng.choices(codec.pool, k=config.prefix_repetition_suffix_len) for _ in range(each)]
    if not all(wanted):
        raise ConfigError("prefix_repetition_suffix_len is too small: prompts would be empty")
    if not config.disable_shuffle:
        rng.shuffle(wanted)
    return [
        DatasetSample(ids, config.prefix_repetition_output_len, text) for text, ids in make_texts(codec, wanted, rng)
    ]


def _sharegpt(config: DatasetConfig, codec: Codec, count: int, rng: random.Random) -> list[DatasetSample]:
    """Return the first question of each conversation, with as many output tokens as its answer has."""
    path = config.dataset_path
    entries = _json(repr(path), _read(path))
    turns = [entry.get("conversations") for entry in entries if isinstance(entry, dict)]
    conversations = [(t[0].get("value"), t[1].get("value")) for t in turns if isinstance(t, list) and len(t) >= 2]
    conversations = [
        (question, reply) for question, reply in conversations if isinstance(question, str) and isinstance(reply, str)
    ]
    if not config.disable_shuffle:
        rng.shuffle(conversations)
    samples: list[DatasetSample] = []
    for start in range(0, len(conversations), MAX_BATCH_LINES):
        part = conversations[start : start + MAX_BATCH_LINES]
        question = codec.encode([text for text, _ in part])
        reply = codec.encode([text for _, text in part])
        for (text, _), prompt, answer in zip(part, question, reply, strict=True):
            output = config.sharegpt_output_len or len(answer)
            fits = len(prompt) <= MAX_PROMPT_TOKENS and len(prompt) + output <= MAX_TOKENS
            long_enough = len(prompt) >= MIN_TOKENS and (config.sharegpt_output_len or output >= MIN_TOKENS)
            if fits and long_enough:
                samples.append(DatasetSample(prompt, output, text))
        if len(samples) >= count:
            break
    return samples[:count]


def _custom(config: DatasetConfig, codec: Codec, count: int, rng: random.Random) -> list[DatasetSample]:
    lines = list(_lines(config.dataset_path))
    if not config.disable_shuffle:
        rng.shuffle(lines)
    lines = lines[:count]
    for line in lines:
        if not isinstance(line.get("prompt"), str) or not line["prompt"]:
            raise ConfigError(f"dataset_path: a line of {config.dataset_path!r} has no prompt")
    texts = [line["prompt"] for line in lines]
    outputs = [_custom_output(config, line) for line in lines]
    ids = codec.encode(texts)
    return [DatasetSample(each, output, text) for each, output, text in zip(ids, outputs, texts, strict=True)]


def _custom_output(config: DatasetConfig, line: dict[str, Any]) -> int:
    if config.custom_output_len != -1:
        return config.custom_output_len
    output = line.get("output_tokens")
    if type(output) is not int or output < 1:
        raise ConfigError("custom_output_len -1 needs a positive output_tokens in every line")
    return output


def templated(samples: Sequence[DatasetSample], codec: Codec) -> list[DatasetSample]:
    """Return texts as token ids of a chat with one user message: exactly what a chat sends to the model."""
    ids = codec.chat([sample.text or "" for sample in samples])
    return [DatasetSample(each, sample.output_len) for each, sample in zip(ids, samples, strict=True)]


def _timed_trace(config: DatasetConfig, codec: Codec, count: int, rng: random.Random) -> list[DatasetSample]:
    """Return prompts of token ids: equal hashes stand for equal tokens. Tokens beyond the hashes are unique."""
    samples: list[DatasetSample] = []
    first_s: float | None = None
    pool, chunk = codec.pool, config.timed_trace_chunk_hash_size
    for number, line in enumerate(_lines(config.dataset_path)):
        if number == count:
            break
        try:
            length, output = int(line["input_length"]), int(line["output_length"])
            due_s = float(line["timestamp"]) * config.timed_trace_sec_multiplier
            hashes = list(line.get("hash_ids") or ())
        except (LookupError, TypeError, ValueError):
            raise ConfigError(
                f"dataset_path: line {number + 1} of {config.dataset_path!r} is not an entry of a trace"
            ) from None
        if length < 1 or output < 1:
            raise ConfigError(f"dataset_path: line {number + 1} of {config.dataset_path!r} has a length below 1")
        ids: list[int] = []
        for hashed in hashes[: -(-length // chunk)]:
            ids += random.Random(f"chunk {hashed}").choices(pool, k=chunk)
        ids = (ids + rng.choices(pool, k=max(0, length - len(ids))))[:length]
        first_s = due_s if first_s is None else first_s
        samples.append(DatasetSample(ids, output, at_s=max(0.0, due_s - first_s)))
    return samples


def _lines(path: str | None) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(_read(path).splitlines()):
        if text.strip():
            line = _json(f"line {number + 1} of {path!r}", text)
            if not isinstance(line, dict):
                raise ConfigError(f"dataset_path: line {number + 1} of {path!r} is not an object")
            yield line


def _read(path: str | None) -> str:
    assert path is not None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_path: cannot read {path!r}: {reason_of(error)}") from None


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"dataset_path: {what} is not JSON: {error}") from None


Loader = Callable[[DatasetConfig, Codec, int, random.Random], list[DatasetSample]]
_LOADERS: dict[str, Loader] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "timed_trace": _timed_trace,
}
