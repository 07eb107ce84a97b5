"""Random loads with LoRA adapters on few slots: any schedule gives the tokens of an engine with a slot for each.

Reads fail or take long, host memory is small, requests are aborted and preempted, and adapters share slots where
requests have a TPOT objective. The runner checks that no slot is written while a row in flight uses it, and that each
row uses the adapter that was in its slot when its request took its seat.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Slo
from tests.helpers.cases import examples
from tests.helpers.fake_adapters import FakeAdapterFiles, adapter, make_slots
from tests.property.test_engine import JobAdapters, assert_same, fits, make_jobs, policies, run, run_at_ease
from tests.property.test_offload import offloading

ADAPTERS = [adapter(name) for name in "abcde"]
BROKEN = adapter("broken")


@examples(300, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    depth=st.sampled_from([1, 2]),
    num_slots=st.sampled_from([1, 1, 2, 3]),
    host=st.sampled_from([0, 1, 2, 10]),
    calls=st.sampled_from([1, 3, 20]),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 12),
    num_host_blocks=st.sampled_from([0, 0, 40]),
    fail_on_token=st.sampled_from([None, None, 7]),
    tpot_s=st.sampled_from([None, 5.0, 50.0]),
    options=policies() | st.sampled_from([{"scheduling_policy": name} for name in ("slack", "scorpio", "qoserve")]),
)
def test_any_slots_give_the_same_tokens(
    seed, depth, num_slots, host, calls, block_size, spare_blocks, num_host_blocks, fail_on_token, tpot_s, options
) -> None:
    rng = random.Random(seed)
    jobs = make_jobs(rng, count=10, longest=20)
    of = [rng.choice([None, *ADAPTERS, BROKEN]) for _ in jobs]
    folders = {BROKEN.path: "planted failure"}
    ease = FakeAdapterFiles(1, folders)
    expected = run_at_ease(jobs, fail_on_token, lora=JobAdapters(ease, make_slots(ease, len(ADAPTERS)), of))
    files = FakeAdapterFiles(calls, folders)
    pinned = (ADAPTERS[0],) if host else ()
    got = run(
        jobs,
        lora=JobAdapters(files, make_slots(files, num_slots, host, pinned), of),
        slo=None if tpot_s is None else Slo(tpot_s=tpot_s),
        fail_on_token=fail_on_token,
        depth=depth,
        num_blocks=fits(jobs, block_size) + spare_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        offloading=offloading(0.002),
        **options,
    )
    assert_same(expected, got)
    for name, each in got.items():
        if of[int(name.partition(":")[0])] is BROKEN:
            assert each.reason in (FinishReason.ERROR, FinishReason.ABORT) and not each.tokens
