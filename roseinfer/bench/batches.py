"""`bench latency` and `bench throughput`: batches of equal requests through the engine, offline or over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from roseinfer.bench.http_load import http_sender, server
from roseinfer.bench.load import BatchTimes, Send, engine_sender, make_prompts, run_batch
from roseinfer.bench.report import percentile, percentiles
from roseinfer.config.hub import load_tokenizer, model_folder
from roseinfer.core.config.engine import EngineConfig, ModelConfig
from roseinfer.engine.start import start_engine
from roseinfer.models.documents import read_config, text_fields

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class BatchWorkload:
    """`iterations` batches of each size after `warmup` uncounted ones. Every batch has its own prompts."""

    batch_sizes: tuple[int, ...]
    input_len: int
    output_len: int
    warmup: int
    iterations: int
    seed: int
    vocab_size: int

    def prompts(self, batch_size: int, iteration: int) -> list[list[int]]:
        return make_prompts(batch_size, self.input_len, self.vocab_size, self.seed + 7919 * iteration)


@asynccontextmanager
async def offline_sender(config: EngineConfig) -> AsyncIterator[Send]:
    engine = await start_engine(config, load_tokenizer(config.model), in_process=True)
    try:
        yield engine_sender(engine)
    finally:
        await engine.close()


@asynccontextmanager
async def online_sender(model: str, options: list[str]) -> AsyncIterator[Send]:
    """Yield a client of a new server process, which starts its engine in another process."""
    async with server(model, options) as base_url, http_sender(base_url, model) as send:
        yield send


async def measure(send: Send, load: BatchWorkload) -> dict[int, list[BatchTimes]]:
    """Return the counted batches by batch size."""
    measured: dict[int, list[BatchTimes]] = {}
    for size in load.batch_sizes:
        for i in range(load.warmup + load.iterations):
            times = await run_batch(send, f"b{size}-{i}", load.prompts(size, i), load.output_len)
            if i >= load.warmup:
                measured.setdefault(size, []).append(times)
    return measured


def summarise(name: str, measured: dict[int, list[BatchTimes]]) -> list[dict[str, Any]]:
    """Return a row per batch size; rates are medians over the batches."""
    rows = []
    for size, batches in measured.items():
        latencies = [batch.total_s for batch in batches]
        row: dict[str, Any] = {
            "engine": name,
            "batch": size,
            "output tok/s": percentile([b.output_rate for b in batches], 50),
            "decode tok/s": percentile([b.decode_rate for b in batches], 50),
            "latency s avg": sum(latencies) / len(latencies),
        }
        row |= percentiles(latencies, PERCENTILES)
        rows.append(row)
    return rows


def vocab_size(config: ModelConfig) -> int:
    """Return the number of ids that prompts may have: the tokenizer's if the model's config leaves it to a default."""
    return int(text_fields(read_config(model_folder(config))).get("vocab_size") or load_tokenizer(config).vocab_size)
