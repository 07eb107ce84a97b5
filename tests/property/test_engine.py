"""Random loads on small caches: under any schedule, each request gives the same tokens and nothing leaks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.adapters import Adapter
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.sched.adapters import AdapterSlots
from roseinfer.sched.registry import options_of
from tests.helpers.cases import examples
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted
from tests.helpers.fake_adapters import FakeAdapterFiles, FakeAdapterSlots
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.waited import check_whys, watch

VOCAB = 12  # small, so that end tokens and shared prefixes are frequent
AT_EASE = 100  # blocks: all jobs fit, and integrity is checked after each step


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: tuple[tuple[str, object], ...]
    at_step: int
    n: int
    abort_after: int | None


class JobAdapters(NamedTuple):
    """LoRA adapters of jobs: their folders, the slots, and the adapter of each job."""

    files: FakeAdapterFiles
    slots: AdapterSlots
    of: Sequence[Adapter | None]


def make_jobs(rng: random.Random, count: int, longest: int) -> list[Job]:
    heads = [tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))) for _ in range(3)]
    jobs = []
    for _ in range(count):
        prompt = rng.choice(heads) + tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 3])))
        params = {
            "max_tokens": rng.choice([0, 1, rng.randrange(2, 14), rng.randrange(2, 14)]),
            "seed": rng.randrange(4),
            "ignore_eos": rng.random() < 0.5,
            "frequency_penalty": rng.choice([0.0, 1.0]),
            "logprobs": rng.choice([None, 0]),
            "prompt_logprobs": rng.choice([None, None, 0]),
        }
        if rng.random() < 0.3:
            params["bad_token_ids"] = tuple(
                tuple(rng.randrange(4) for _ in range(rng.choice([1, 2, 3]))) for _ in "abc"
            )
        if rng.random() < 0.2:
            params["allowed_token_ids"] = (*range(rng.randrange(4)), VOCAB - 1)
        params["min_tokens"] = rng.choice([0, min(3, params["max_tokens"])])
        abort_after = rng.randrange(12) if rng.random() < 0.2 else None
        jobs.append(Job(prompt, tuple(params.items()), rng.randrange(10), rng.choice([1, 1, 1, 3]), abort_after))
    return jobs


def run(
    jobs: list[Job],
    *,
    fail_on_token: int | None = None,
    reserve: int = 0,
    lora: JobAdapters | None = None,
    slo: Slo | None = None,
    **options: object,
) -> dict[str, Collected]:
    host, windows = options.get("num_host_blocks", 0), options.get("windows", ())
    sizes = {"windows": windows, **{name: options.get(name, 0) for name in ("num_slots", "num_host_slots")}}
    runner = FakeRunner(options["num_blocks"], options["block_size"], VOCAB, fail_on_token, host, **sizes)
    if lora is not None:
        runner.adapters = FakeAdapterSlots(lora.files, lora.slots.pool.num_slots)
    core = make_core(vocab_size=VOCAB, runner=runner, adapters=lora and lora.slots, **options)
    core.scheduler.seating.reserve = reserve
    watched = watch(core)
    collected: dict[str, Collected] = {}
    aborts: dict[int, list[str]] = {}
    for step in range(40):
        for i, job in enumerate(jobs):
            if job.at_step == step:
                of = None if lora is None else lora.of[i]
                add(core, str(i), list(job.prompt), n=job.n, adapter=of, slo=slo, **dict(job.params))
                if job.abort_after is not None:
                    aborts.setdefault(step + job.abort_after, []).append(f"{i}:0")
        core.abort(aborts.pop(step, []))
        core.clock.advance(step % 3 + 0.25)
        gather(core.step(), collected)
        core.scheduler.check_integrity()
    run_dry(core, collected)
    check_limits(core)
    check_whys(core, watched, collected)
    return collected


def check_limits(core: EngineCore) -> None:
    """Check that no submitted step exceeds the options."""
    config = core.scheduler.config
    for plan in submitted(core):
        tokens = sum(row.count for row in plan.rows)
        assert tokens == plan.num_tokens
        if config.enable_chunked_prefill:
            assert tokens <= config.max_num_batched_tokens
        starts = getattr(options_of(config), "prefill_max_batch_size", None)
        assert len(plan.admitted) <= (starts or config.max_num_seqs)


def fits(jobs: list[Job], block_size: int) -> int:
    """Return the blocks that the longest job needs."""
    return -(-max(len(job.prompt) + dict(job.params)["max_tokens"] for job in jobs) // block_size)


def assert_same(expected: dict[str, Collected], got: dict[str, Collected]) -> None:
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
        if want.reason is not FinishReason.ERROR:  # by then, a prompt in chunks has been reported in part
            assert have.prompt_logprobs == want.prompt_logprobs


def run_at_ease(jobs: list[Job], fail_on_token: int | None = None, **options: object) -> dict[str, Collected]:
    return run(
        jobs,
        fail_on_token=fail_on_token,
        **options,
        num_blocks=AT_EASE,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=4000,
    )


@examples(150, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 24),
    budget=st.integers(1, 20),
    seats=st.integers(1, 6),
    chunked=st.booleans(),
    prefix_caching=st.booleans(),
    threshold=st.sampled_from([0, 1, 3]),
)
def test_any_schedule_gives_the_same_tokens(
    seed, depth, block_size, spare_blocks, budget, seats, chunked, prefix_caching, threshold
) -> None:
    jobs = make_jobs(random.Random(seed), count=10, longest=20)
    got = run(
        jobs,
        depth=depth,
        num_blocks=fits(jobs, block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        prefix_caching=prefix_caching,
        long_prefill_token_threshold=threshold,
    )
    assert_same(run_at_ease(jobs), got)


@st.composite
def policies(draw: st.DrawFn) -> dict[str, object]:
    """Draw options of the admission policies; pack's own only with pack."""
    maybe = st.none() | st.integers(1, 4)
    options: dict[str, object] = {
        "scheduling_policy": draw(st.sampled_from(["fifo", "pack"])),
        "prefill_max_tokens": draw(st.none() | st.integers(1, 12)),
        "prefill_max_batch_size": draw(maybe),
        "max_batch_size": draw(maybe),
        "max_active_requests": draw(maybe),
        "decode_first": draw(st.booleans()),
        "enable_chunked_prefill": draw(st.booleans()),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5])),
        "max_num_batched_tokens": draw(st.integers(1, 20)),
        "max_num_seqs": draw(st.integers(1, 6)),
    }
    if options["scheduling_policy"] == "pack":
        options["prefill_admission_lookahead"] = draw(st.sampled_from([1, 3, None]))
        options["prefill_force_fifo_every"] = draw(st.sampled_from([0, 3]))
        options["prefill_max_skips"] = draw(st.sampled_from([0, 2]))
    return options


@examples(300, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 12),
    reserve=st.sampled_from([0, 0, 1, 3]),
    prefix_caching=st.booleans(),
    fail_on_token=st.sampled_from([None, None, 7]),
    options=policies(),
)
def test_any_policy_gives_the_same_tokens(
    seed, depth, block_size, spare_blocks, reserve, prefix_caching, fail_on_token, options
) -> None:
    jobs = make_jobs(random.Random(seed), count=8, longest=20)
    got = run(
        jobs,
        reserve=reserve,
        fail_on_token=fail_on_token,
        depth=depth,
        num_blocks=fits(jobs, block_size) + spare_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
        **options,
    )
    assert_same(run_at_ease(jobs, fail_on_token), got)
