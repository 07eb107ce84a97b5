"""Recurrent states: each row begins from the state after exactly the tokens before it, and nothing leaks.

The runner's slots hold the fingerprint of all tokens that were consumed, so a wrong slot, snapshot or copy fails at
once (`tests/helpers/fake_slots.py`).
"""

import random
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.runner import WindowPool
from roseinfer.sched import snapshots
from tests.helpers.cases import examples
from tests.property.test_engine import Job, assert_same, fits, make_jobs, policies, run, run_at_ease


def chats(seed: int, count: int) -> list[Job]:
    """Return jobs of which some end with a generation prompt."""
    rng = random.Random(seed)
    jobs = make_jobs(rng, count, longest=20)
    added = [("generation_prompt_len", rng.choice([0, 0, rng.randrange(len(job.prompt) + 1)])) for job in jobs]
    return [replace(job, params=(*job.params, one)) for job, one in zip(jobs, added, strict=True)]


@examples(300, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 24),
    num_slots=st.sampled_from([1, 2, 3, 4, 6, 10, 30]),
    rolling_tokens=st.sampled_from([1, 4, 8, 64]),
    prefix_caching=st.booleans(),
    fail_on_token=st.sampled_from([None, None, 7]),
    options=policies(),
)
def test_any_schedule_gives_the_same_tokens(
    seed, depth, block_size, spare_blocks, num_slots, rolling_tokens, prefix_caching, fail_on_token, options
) -> None:
    jobs = chats(seed, 10)
    with patch.object(snapshots, "MIN_ROLLING_TOKENS", rolling_tokens):
        got = run(
            jobs,
            fail_on_token=fail_on_token,
            depth=depth,
            num_blocks=fits(jobs, block_size) + spare_blocks,
            block_size=block_size,
            num_slots=num_slots,
            prefix_caching=prefix_caching,
            **options,
        )
    assert_same(run_at_ease(jobs, fail_on_token), got)


@examples(60, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 4]),
    window=st.integers(1, 12),
    spare_blocks=st.integers(0, 24),
    num_slots=st.sampled_from([1, 3, 6, 30]),
    budget=st.integers(1, 20),
)
def test_states_and_windows_agree_on_prefixes(seed, depth, block_size, window, spare_blocks, num_slots, budget) -> None:
    jobs = chats(seed, 10)
    windows = (WindowPool(window, -(-(window + budget) // block_size) + 1 + spare_blocks),)
    with patch.object(snapshots, "MIN_ROLLING_TOKENS", 4):
        got = run(
            jobs,
            depth=depth,
            num_blocks=fits(jobs, block_size) + spare_blocks,
            block_size=block_size,
            num_slots=num_slots,
            windows=windows,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
        )
    assert_same(run_at_ease(jobs), got)
