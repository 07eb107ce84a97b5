"""Drafts, right or wrong, change when tokens come but not which, over random loads, policies and tiny caches."""

import random
from collections import deque
from functools import partial
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.outputs import SequenceOutput
from roseinfer.engine.core import EngineCore
from roseinfer.sched import snapshots
from tests.helpers.cases import examples
from tests.helpers.drafters import Oracle, every_draft_of, priced_draft_of
from tests.property import test_slo
from tests.property.test_engine import VOCAB, assert_same, fits, make_jobs, policies, run, run_at_ease

DRAFTERS = {
    "right": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    "longest": st.sampled_from([1, 3, 8]),
}
PRICINGS = st.sampled_from([every_draft_of, priced_draft_of, partial(priced_draft_of, overlap=True)])


class NeverDrained(EngineCore):
    """Core that also plans while drafts are being verified: the scheduler must not depend on the loop around it."""

    def step(self) -> list[SequenceOutput]:
        outputs, self._ended = self._ended, []
        self._open: deque = getattr(self, "_open", deque())
        plan = self.scheduler.plan(self.clock.now())
        outputs += self.scheduler.take_ended()
        if plan is not None:
            handle = self.runner.submit(plan)
            self.runner.sample(handle)
            self._open.append((plan, handle))
        if self._open and (plan is None or len(self._open) >= self.depth):
            done, handle = self._open.popleft()
            outputs += self.scheduler.commit(done, self.runner.collect(handle), self.clock.now())
        return outputs

    @property
    def busy(self) -> bool:
        return bool(getattr(self, "_open", None) or self._ended or self.scheduler.has_work)


@examples(200, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    engine=st.sampled_from([EngineCore, NeverDrained]),
    depth=st.sampled_from([1, 2]),
    policy=st.sampled_from(["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 24),
    reserve=st.sampled_from([0, 0, 2]),
    budget=st.integers(1, 24),
    seats=st.integers(1, 6),
    prefix_caching=st.booleans(),
    pricing=PRICINGS,
    **DRAFTERS,
)
def test_any_drafts_give_the_same_tokens(
    seed,
    engine,
    depth,
    policy,
    block_size,
    spare_blocks,
    reserve,
    budget,
    seats,
    prefix_caching,
    pricing,
    right,
    longest,
) -> None:
    jobs = make_jobs(random.Random(seed), count=10, longest=20)
    ease = run_at_ease(jobs)
    drafter = Oracle({name: said.tokens for name, said in ease.items()}, VOCAB, right, longest, seed)
    got = run(
        jobs,
        reserve=reserve,
        engine=engine,
        drafting=pricing(drafter),
        depth=depth,
        scheduling_policy=policy,
        num_blocks=fits(jobs, block_size) + spare_blocks,
        block_size=block_size,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    assert_same(ease, got)


@examples(100, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    policy=st.sampled_from(["sarathi", "qoserve", "scorpio", "slack", "slack"]),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 24),
    budget=st.integers(1, 40),
    seats=st.integers(1, 6),
    pricing=PRICINGS,
    **DRAFTERS,
)
def test_any_drafts_give_the_same_tokens_under_objectives(
    seed, depth, policy, block_size, spare_blocks, budget, seats, pricing, right, longest
) -> None:
    jobs = test_slo.make_jobs(random.Random(seed), count=10)
    blocks = -(-max(len(job.add.prompt.ids) + job.add.prompt.params.max_tokens for job in jobs) // block_size)
    ease = test_slo.run(jobs, test_slo.AT_EASE, 16, max_num_seqs=64, max_num_batched_tokens=4000)
    got = test_slo.run(
        jobs,
        blocks + spare_blocks,
        block_size,
        drafting=pricing(
            Oracle({name: said.tokens for name, said in ease.items()}, test_slo.VOCAB, right, longest, seed)
        ),
        depth=depth,
        scheduling_policy=policy,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
    )
    assert got.keys() == ease.keys()
    for name, want in ease.items():
        have = got[name]
        if have.reason in test_slo.CUT_SHORT or want.reason in test_slo.CUT_SHORT:
            shorter = min(len(want.tokens), len(have.tokens))
            assert have.tokens[:shorter] == want.tokens[:shorter]
        else:
            assert (have.tokens, have.reason) == (want.tokens, want.reason)


@examples(60, derandomize=True)
@given(seed=st.integers(0, 10**6), depth=st.sampled_from([1, 2]), spare_blocks=st.integers(0, 12), **DRAFTERS)
def test_a_failure_among_drafts_ends_that_request_where_it_would_end(seed, depth, spare_blocks, right, longest) -> None:
    jobs = make_jobs(random.Random(seed), count=8, longest=20)
    whole = run_at_ease(jobs)
    got = run(
        jobs,
        fail_on_token=7,
        drafter=Oracle({name: said.tokens for name, said in whole.items()}, VOCAB, right, longest, seed),
        depth=depth,
        num_blocks=fits(jobs, 4) + spare_blocks,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    assert_same(run_at_ease(jobs, fail_on_token=7), got)


@examples(200, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    engine=st.sampled_from([EngineCore, NeverDrained]),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 24),
    num_slots=st.sampled_from([1, 2, 3, 6, 30]),
    rolling_tokens=st.sampled_from([1, 4, 8]),
    prefix_caching=st.booleans(),
    fail_on_token=st.sampled_from([None, None, 7]),
    options=policies(),
    pricing=PRICINGS,
    **DRAFTERS,
)
def test_any_drafts_give_the_same_tokens_with_recurrent_states(
    seed,
    engine,
    depth,
    block_size,
    spare_blocks,
    num_slots,
    rolling_tokens,
    prefix_caching,
    fail_on_token,
    options,
    pricing,
    right,
    longest,
) -> None:
    """A state consumes drafts in the row after the one that verified them, if they were right."""
    jobs = make_jobs(random.Random(seed), count=10, longest=20)
    ease = run_at_ease(jobs)
    drafter = Oracle({name: said.tokens for name, said in ease.items()}, VOCAB, right, longest, seed)
    with patch.object(snapshots, "MIN_ROLLING_TOKENS", rolling_tokens):
        got = run(
            jobs,
            fail_on_token=fail_on_token,
            engine=engine,
            drafting=pricing(drafter),
            depth=depth,
            num_blocks=fits(jobs, block_size) + spare_blocks,
            block_size=block_size,
            num_slots=num_slots,
            prefix_caching=prefix_caching,
            **options,
        )
    assert_same(run_at_ease(jobs, fail_on_token), got)
