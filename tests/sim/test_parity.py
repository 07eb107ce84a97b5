"""A real run of the embedded model on the real clock, recorded, and replayed: the same plans, the same latencies.

Step times are replayed, so nothing here depends on how fast the machine is.
"""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, ProfileConfig, SchedulerConfig
from roseinfer.core.outputs import COMPLETE, FinishReason
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.api import Engine, GenerateRequest, SequenceChunk
from roseinfer.engine.start import start_engine
from roseinfer.sim.parity import Parity, compare
from roseinfer.sim.replay import EngineRecording, read_recording, replay
from tests.helpers.cases import cases

REQUESTS, RATE = 40, 25.0
LONG_REQUEST, LONG_TOKENS = 12, 110  # a turn a token: that many turns, however many requests a slow machine batches
SLOS = (None, Slo(0.2, 0.01), Slo(0.05, 0.006), Slo(1.0, 0.02), Slo(e2e_s=0.5), None)


def engine_config(file: Path, policy: str, overlap: bool) -> EngineConfig:
    """Few blocks, so that requests are preempted under load."""
    return EngineConfig(
        model=ModelConfig(threads=1),
        cache=CacheConfig(num_kv_blocks=160),
        scheduler=SchedulerConfig(scheduling_policy=policy, overlap=overlap, max_num_seqs=24),
        profile=ProfileConfig(record=str(file)),
    )


def leaves(number: int) -> bool:
    """True if the client disconnects at its first token."""
    return number % 12 == 5


def make_request(number: int, rng: random.Random) -> GenerateRequest:
    """Some share a prefix, some end when the model ends them, some want two samples."""
    prompt = [7 + i for i in range(40)] if number % 3 == 0 else []
    prompt += [rng.randrange(10, 2000) for _ in range(rng.randint(4, 150))]
    stop = tuple(range(100, 500)) if number % 4 == 2 else ()
    max_tokens = 300 if leaves(number) else rng.randint(2, 60)
    if number == LONG_REQUEST:
        max_tokens = LONG_TOKENS
    sampling = SequenceParams(max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=number == LONG_REQUEST)
    return GenerateRequest(
        request_id=str(number),
        prompt=Prompt(prompt, sampling, RequestMeta(slo=SLOS[number % len(SLOS)])),
        n=2 if number % 10 == 0 else 1,
    )


class Load:
    """An open loop: requests go out when they are due, some are given up, some are followed up."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ends: list[SequenceChunk] = []

    async def run(self) -> None:
        rng = random.Random(1)
        async with asyncio.TaskGroup() as tasks:
            for number in range(REQUESTS):
                request = make_request(number, rng)
                await asyncio.sleep(rng.expovariate(RATE))
                tasks.create_task(self._send(request, leaves(number)))

    async def _send(self, request: GenerateRequest, leaves_early: bool = False) -> None:
        stream = self._engine.generate(request)
        output: list[int] = []
        async for chunk in stream:
            output += chunk.token_ids if chunk.index == 0 else []
            if chunk.finish_reason is not None:
                self.ends.append(chunk)
            if leaves_early:
                stream.cancel()
                return
        if request.request_id in ("4", "8", "14", "20"):  # the next turn of a conversation finds it in the cache
            longer = [*request.prompt.ids, *output, 50, 51]
            prompt = replace(request.prompt, ids=longer)
            await self._send(replace(request, request_id=f"{request.request_id}+", prompt=prompt))


async def run_load(config: EngineConfig) -> list[SequenceChunk]:
    engine = await start_engine(config, load_tokenizer(config.model), in_process=True)
    try:
        load = Load(engine)
        async with asyncio.timeout(60):
            await load.run()
    finally:
        await engine.close()
    return load.ends


def seen_by_clients(ends: list[SequenceChunk]) -> tuple[list[float], list[float]]:
    """TTFTs and TPOTs in ascending order, from what the engine told the clients of requests that it completed."""
    known = [(end.times, end.num_output_tokens) for end in ends if end.times and end.finish_reason in COMPLETE]
    ttfts = [times.first_token_s - times.arrival_s for times, _ in known]
    tpots = [(times.finished_s - times.first_token_s) / (tokens - 1) for times, tokens in known if tokens > 1]
    return sorted(ttfts), sorted(tpots)


def record(file: Path, policy: str, overlap: bool) -> tuple[EngineRecording, list[SequenceChunk]]:
    ends = asyncio.run(run_load(engine_config(file, policy, overlap)))
    return read_recording(str(file)), ends


@cases(("policy", "overlap"), [("slack", True)], exhaustive=[("slack", False), ("fifo", True), ("fifo", False)])
def test_a_real_run_replayed_is_the_same_run(tmp_path: Path, policy: str, overlap: bool) -> None:
    recording, ends = record(tmp_path / "run.jsonl", policy, overlap)
    again = replay(recording)
    parity = compare(recording, again)
    assert again.plans == recording.plans
    assert parity.plans_agree and parity.medians_agree and parity.turns >= LONG_TOKENS
    # Not only what the file says of itself: what clients were told.
    complete = [name for name, end in recording.ends.items() if end.reason in COMPLETE]
    ttfts, tpots = seen_by_clients(ends)
    assert len(ttfts) >= sum(SLOS[i % len(SLOS)] is None and not leaves(i) for i in range(REQUESTS)), "none is rejected"
    assert sorted(again.ttft_s[name] for name in complete) == ttfts
    replayed = [tpot_s for name in complete if (tpot_s := again.tpot_s[name]) is not None]
    assert sorted(replayed) == pytest.approx(tpots, rel=1e-6)
    reasons = {end.reason for end in recording.ends.values()}
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} <= reasons, "the run was too simple"
    # With other options, it is said where plans part.
    other = compare(recording, replay(recording, SchedulerConfig(scheduling_policy="fifo", max_num_batched_tokens=64)))
    assert not other.plans_agree and other.same < other.turns
    assert f"first {other.same} turns" in str(other)


def test_medians_that_differ_by_more_than_5_percent_do_not_agree() -> None:
    near = Parity(1, 1, 2, 2, (1.0, 1.04), (0.1, 0.1))
    assert near.medians_agree and "+4.00%" in str(near) and "all the same" in str(near)
    assert not replace(near, tpot_s=(0.1, 0.11)).medians_agree
    assert replace(near, ttft_s=None, tpot_s=None).medians_agree
