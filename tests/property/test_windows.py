"""Window groups: whatever is released, copied and found again, each row reads what it must, and nothing leaks."""

import random

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.plan import StepLimits
from roseinfer.core.runner import WindowPool
from roseinfer.sched.registry import scheduler_config
from tests.helpers.cases import examples
from tests.helpers.engines import add, make_core, run_dry
from tests.property.test_engine import assert_same, fits, make_jobs, run, run_at_ease


def pools(windows: list[int], block_size: int, spare: int, context: int, **options: object) -> tuple[WindowPool, ...]:
    """Return pools that hold one sequence and `spare` blocks more."""
    config = scheduler_config(**options)
    tokens = StepLimits.of(config, context).max_tokens
    return tuple(WindowPool(window, -(-(window + tokens) // block_size) + 1 + spare) for window in windows)


@examples(120, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    windows=st.lists(st.integers(1, 12), min_size=1, max_size=2),
    depth=st.sampled_from([1, 2]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    spare_blocks=st.integers(0, 24),
    spare_in_windows=st.integers(0, 24),
    prefix_caching=st.booleans(),
    fail_on_token=st.sampled_from([None, None, 7]),
    options=st.fixed_dictionaries(
        {
            "max_num_batched_tokens": st.integers(1, 20),
            "max_num_seqs": st.integers(1, 6),
            "enable_chunked_prefill": st.booleans(),
            "long_prefill_token_threshold": st.sampled_from([0, 1, 3]),
        }
    ),
)
def test_any_schedule_gives_the_same_tokens(
    seed, windows, depth, block_size, spare_blocks, spare_in_windows, prefix_caching, fail_on_token, options
) -> None:
    jobs = make_jobs(random.Random(seed), count=10, longest=20)
    num_blocks = fits(jobs, block_size) + spare_blocks
    got = run(
        jobs,
        fail_on_token=fail_on_token,
        depth=depth,
        num_blocks=num_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching,
        windows=pools(windows, block_size, spare_in_windows, num_blocks * block_size, **options),
        **options,
    )
    assert_same(run_at_ease(jobs, fail_on_token), got)


def test_blocks_that_left_the_window_are_free_and_a_later_turn_finds_the_last_window() -> None:
    windows = (WindowPool(8, 40),)
    core = make_core(num_blocks=100, block_size=4, max_num_batched_tokens=16, windows=windows, vocab_size=50)
    prompt = [i % 40 + 4 for i in range(200)]
    add(core, "first", prompt, max_tokens=20, ignore_eos=True)
    held = []
    while core.busy:
        core.step()
        held.append(40 - core.scheduler.kv.windows[0].pool.num_free)
    assert max(held) <= (8 + 16) // 4 + 1
    assert max(held[-10:]) <= 4, "a decoding sequence holds its window"
    turn = prompt + submitted_tokens(core)
    add(core, "second", [*turn, 1, 2, 5], max_tokens=4)
    found = run_dry(core)
    assert found["second:0"].cached_tokens >= len(turn) - 4


def submitted_tokens(core) -> list[int]:
    """Return the outputs of the first request so far that are in the cache."""
    (seat,) = core.runner.seats.values()
    return seat.tokens[seat.admission.prompt_len :]


def test_requests_that_share_a_system_prompt_find_it_after_the_first_divergence() -> None:
    """The first request's window has moved on; the second one keeps the window before the divergence."""
    core = make_core(num_blocks=200, block_size=4, max_num_batched_tokens=16, windows=(WindowPool(8, 20),))
    shared = [i % 40 + 4 for i in range(100)]
    cached = []
    for number in range(4):
        add(core, str(number), shared + [number] * 90, max_tokens=4, ignore_eos=True)
        cached.append(run_dry(core)[f"{number}:0"].cached_tokens)
    assert cached[0] == 0
    assert cached[2] == cached[3] == 100


def test_a_request_alone_waits_until_the_step_in_flight_lets_its_window_move_on() -> None:
    """No request is preempted for it, not even itself."""
    core = make_core(depth=2, num_blocks=40, block_size=2, max_num_batched_tokens=4, windows=(WindowPool(6, 6),))
    add(core, "alone", list(range(4, 34)), max_tokens=4, ignore_eos=True)
    assert len(run_dry(core)["alone:0"].tokens) == 4
    assert core.stats().preemptions == 0


def test_statistics_and_promises_report_the_fullest_pool() -> None:
    """Else a router would send more requests to an engine whose windows are full."""
    core = make_core(num_blocks=100, block_size=4, max_num_batched_tokens=16, windows=(WindowPool(8, 10),))
    add(core, "one", list(range(4, 20)), max_tokens=4, ignore_eos=True)
    core.step()
    held = 10 - core.scheduler.kv.windows[0].pool.num_free
    assert held > 1 and core.scheduler.kv.num_free > 90
    assert core.stats().blocks_used == 10 * held
    assert core.scheduler.promise(0.0).free_blocks == 100 - 10 * held
