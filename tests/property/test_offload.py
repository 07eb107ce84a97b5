"""Random loads on small caches with blocks in host memory: tokens equal those of an engine with a large cache.

The runner keeps fingerprints in both memories. An unfinished copy leaves junk in its target. A copy fails if its source
or target is written meanwhile.
"""

import random
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.sched import snapshots
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.offload import OffloadCosts
from tests.helpers.cases import examples
from tests.property.test_engine import assert_same, fits, make_jobs, policies, run, run_at_ease

EXPENSIVE = CostParams(token_s=1.0)


def offloading(copy_s: float) -> OffloadCosts:
    """Return an offload for which loads always pay; a step without prompts has time for 5 ms of copies."""
    return OffloadCosts(CostModel(EXPENSIVE, fit=False), False, copy_s, copy_s, slot_blocks=1.5)


@examples(250, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 12),
    num_host_blocks=st.integers(1, 60),
    copy_s=st.sampled_from([0.0, 0.002, 0.005]),
    reserve=st.sampled_from([0, 0, 1, 3]),
    fail_on_token=st.sampled_from([None, None, 7]),
    num_slots=st.sampled_from([0, 0, 1, 3, 8, 30]),
    num_host_slots=st.sampled_from([0, 1, 2, 8, 30]),
    rolling_tokens=st.sampled_from([1, 4, 64]),
    options=policies(),
)
def test_any_host_memory_gives_the_same_tokens(
    seed,
    depth,
    block_size,
    spare_blocks,
    num_host_blocks,
    copy_s,
    reserve,
    fail_on_token,
    num_slots,
    num_host_slots,
    rolling_tokens,
    options,
) -> None:
    jobs = make_jobs(random.Random(seed), count=8, longest=20)
    with patch.object(snapshots, "MIN_ROLLING_TOKENS", rolling_tokens):
        got = run(
            jobs,
            reserve=reserve,
            fail_on_token=fail_on_token,
            depth=depth,
            num_blocks=fits(jobs, block_size) + spare_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            offloading=offloading(copy_s),
            num_slots=num_slots,
            num_host_slots=num_host_slots,
            **options,
        )
    assert_same(run_at_ease(jobs, fail_on_token), got)


def test_a_loaded_request_that_may_not_start_delays_no_other() -> None:
    """The only seat was reserved for a request that the policy did not choose; the chosen one could not load."""
    jobs = make_jobs(random.Random(90593), count=10, longest=20)
    options = {"scheduling_policy": "qoserve", "max_num_seqs": 1, "max_num_batched_tokens": 8, "reserve": 1}
    sizes = {"num_blocks": 27, "block_size": 1, "num_host_blocks": 58}
    got = run(jobs, fail_on_token=7, depth=1, offloading=OffloadCosts(), **sizes, **options)
    assert_same(run_at_ease(jobs, 7), got)
