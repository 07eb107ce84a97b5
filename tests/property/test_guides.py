"""Random loads with constrained outputs: they obey under any schedule, and nothing leaks."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.outputs import FinishReason
from roseinfer.engine.core import EngineCore
from tests.helpers.cases import examples
from tests.helpers.drafters import Oracle, UncheckedDrafts
from tests.helpers.guides import ArithmeticGuides, obeys
from tests.property.test_engine import VOCAB, Job, assert_same, fits, make_jobs, run, run_at_ease


def constrained(jobs: list[Job], rng: random.Random) -> list[Job]:
    """Return the same jobs, half of them with a guide that ends them early or late."""
    rules = [
        f"{rng.choice([2, 3, 5])},{rng.randrange(1, 14)},{rng.choice([0, 0, 3])},{rng.choice([-1, -1, 4])},{late}"
        for late in rng.choices([0, 1], k=len(jobs))
    ]
    return [
        replace(job, params=(*job.params, ("guide", rule))) if rng.random() < 0.6 else job
        for job, rule in zip(jobs, rules, strict=True)
    ]


@examples(200, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    policy=st.sampled_from(["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"]),
    block_size=st.sampled_from([1, 4, 8]),
    spare_blocks=st.integers(0, 16),
    budget=st.integers(1, 24),
    seats=st.integers(1, 6),
    prefix_caching=st.booleans(),
    right=st.sampled_from([None, 0.3, 0.7, 1.0]),
    engine=st.sampled_from([EngineCore, UncheckedDrafts]),
)
def test_guided_outputs_obey_and_are_the_same_under_any_schedule(
    seed, depth, policy, block_size, spare_blocks, budget, seats, prefix_caching, right, engine
) -> None:
    rng = random.Random(seed)
    jobs = constrained(make_jobs(rng, count=8, longest=20), rng)
    ease = run_at_ease(jobs, guides=ArithmeticGuides(VOCAB))
    known = {name: said.tokens for name, said in ease.items()}
    guides = ArithmeticGuides(VOCAB)
    got = run(
        jobs,
        guides=guides,
        drafter=None if right is None else Oracle(known, VOCAB, right, 4, seed),
        engine=engine,
        depth=depth,
        scheduling_policy=policy,
        num_blocks=fits(jobs, block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    assert_same(ease, got)
    for i, job in enumerate(jobs):
        rule = dict(job.params).get("guide")
        if rule is not None:
            said = [got[f"{i}:{sample}"] for sample in range(job.n)]
            assert all(obeys(one.tokens, rule) for one in said)
            assert all(one.reason is not FinishReason.STOP or one.tokens for one in said)
