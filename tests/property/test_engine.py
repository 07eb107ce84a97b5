"""Random loads on small pools: whatever the schedule, each request gives the same tokens and nothing leaks."""

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.core.outputs import FinishReason
from tests.helpers.engines import Collected, add, gather, make_core, run_dry

VOCAB = 12  # small, so that end tokens and shared prefixes are frequent


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: tuple[tuple[str, object], ...]
    at_step: int
    n: int
    abort_after: int | None


def make_jobs(rng: random.Random, count: int, longest: int) -> list[Job]:
    heads = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))) for _ in range(3)]
    jobs = []
    for _ in range(count):
        prompt = rng.choice(heads) + tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 3])))
        params = {
            "max_tokens": rng.randrange(1, 14),
            "seed": rng.randrange(4),
            "ignore_eos": rng.random() < 0.5,
            "frequency_penalty": rng.choice([0.0, 1.0]),
            "logprobs": rng.choice([None, 0]),
            "prompt_logprobs": rng.choice([None, None, 0]),
        }
        params["min_tokens"] = rng.choice([0, min(3, params["max_tokens"])])
        abort_after = rng.randrange(12) if rng.random() < 0.2 else None
        jobs.append(Job(prompt, tuple(params.items()), rng.randrange(10), rng.choice([1, 1, 1, 3]), abort_after))
    return jobs


def run(jobs: list[Job], **options: object) -> dict[str, Collected]:
    core = make_core(vocab_size=VOCAB, **options)
    collected: dict[str, Collected] = {}
    aborts: dict[int, list[str]] = {}
    for step in range(40):
        for i, job in enumerate(jobs):
            if job.at_step == step:
                add(core, str(i), list(job.prompt), n=job.n, **dict(job.params))
                if job.abort_after is not None:
                    aborts.setdefault(step + job.abort_after, []).append(f"{i}:0")
        core.abort(aborts.pop(step, []))
        gather(core.step(), collected)
        core.scheduler.check_integrity()
    return run_dry(core, collected)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 24),
    budget=st.integers(1, 20),
    seats=st.integers(1, 6),
    chunked=st.booleans(),
    prefix_caching=st.booleans(),
    threshold=st.sampled_from([0, 3]),
)
def test_any_schedule_gives_the_same_tokens(
    seed, depth, block_size, spare_blocks, budget, seats, chunked, prefix_caching, threshold
) -> None:
    jobs = make_jobs(random.Random(seed), count=10, longest=20)
    longest = max(len(job.prompt) + dict(job.params)["max_tokens"] for job in jobs)
    fits_one = -(-longest // block_size)
    expected = run(jobs, num_blocks=2000, block_size=16, max_num_seqs=64, max_num_batched_tokens=4000)
    got = run(
        jobs,
        depth=depth,
        num_blocks=fits_one + spare_blocks,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        prefix_caching=prefix_caching,
        long_prefill_token_threshold=threshold,
    )
    assert expected.keys() == got.keys()
    for name, want in expected.items():
        have = got[name]
        if FinishReason.ABORT in (want.reason, have.reason):
            shorter = min(len(want.tokens), len(have.tokens))
            assert want.tokens[:shorter] == have.tokens[:shorter]
            continue
        assert have.tokens == want.tokens, name
        assert have.reason == want.reason
        assert have.logprobs == want.logprobs
        assert have.prompt_logprobs == want.prompt_logprobs
