"""Closed batches: concurrent requests that are read to their end, with the time of every token."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import Engine, GenerateRequest

# Sends one prompt for `output_len` tokens; returns (time, tokens) of each chunk that was read.
Send = Callable[[str, list[int], int], Awaitable[list[tuple[float, int]]]]


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times of one batch in seconds. `decode_s`: from the last request's first token to the last token."""

    batch_size: int
    output_tokens: int
    total_s: float
    decode_tokens: int
    decode_s: float

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.total_s

    @property
    def decode_rate(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s > 0 else float("nan")


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return distinct prompts of random ids; other arguments give other prompts, so that no prefix cache has them."""
    rng = random.Random(f"{seed} {count} {length}")
    return [[rng.randrange(10, vocab_size) for _ in range(length)] for _ in range(count)]


async def run_batch(send: Send, name: str, prompts: list[list[int]], output_len: int) -> BatchTimes:
    """Run one batch. Raise RuntimeError if a request gives fewer tokens than asked for."""
    start = time.perf_counter()
    results = await asyncio.gather(*(send(f"{name}-{i}", ids, output_len) for i, ids in enumerate(prompts)))
    counts = [sum(tokens for _, tokens in chunks) for chunks in results]
    if set(counts) != {output_len}:
        raise RuntimeError(f"requests gave {sorted(set(counts))} tokens, not {output_len}")
    chunks = [chunk for result in results for chunk in result]
    last = max(at for at, _ in chunks)
    all_started = max(result[0][0] for result in results)
    decoded = sum(tokens for at, tokens in chunks if at > all_started)
    return BatchTimes(len(prompts), sum(counts), last - start, decoded, last - all_started)


def engine_sender(engine: Engine) -> Send:
    """Return a sender to an engine in this process or its own, without HTTP."""

    async def send(name: str, prompt_ids: list[int], output_len: int) -> list[tuple[float, int]]:
        params = SequenceParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        stream = engine.generate(GenerateRequest(request_id=name, prompt=Prompt(prompt_ids, params)))
        return [(time.perf_counter(), len(chunk.token_ids)) async for chunk in stream]

    return send
