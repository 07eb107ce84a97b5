"""Contents of steps: budgets, chunks, mixed steps, admission order, preemption."""

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import FinishReason
from roseinfer.engine.core import EngineCore
from roseinfer.sched.registry import scheduler_config
from tests.helpers.engines import Collected, add, gather, make_core, run_dry, submitted


def rows_of(core: EngineCore) -> list[dict[str, int]]:
    """Per submitted step: request -> tokens computed."""
    return [{row.request_id.split(":")[0]: row.count for row in plan.rows} for plan in submitted(core)]


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first * 7 + i) % 50 for i in range(length)]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    core = make_core(max_num_batched_tokens=6, prefix_caching=False)
    add(core, "short", prompt(3), max_tokens=6, ignore_eos=True)
    core.step()
    add(core, "long", prompt(12, 1), max_tokens=2, ignore_eos=True)
    run_dry(core)
    assert rows_of(core)[:5] == [
        {"short": 3},
        {"short": 1, "long": 5},
        {"short": 1, "long": 5},
        {"short": 1, "long": 2},
        {"short": 1, "long": 1},
    ]


def test_the_token_budget_is_never_exceeded_with_chunking() -> None:
    core = make_core(max_num_batched_tokens=5)
    for i in range(8):
        add(core, str(i), prompt(3 + 2 * i, i), max_tokens=5, ignore_eos=True)
    run_dry(core)
    totals = [sum(rows.values()) for rows in rows_of(core)]
    assert max(totals) == 5
    assert [plan.num_tokens for plan in submitted(core)] == totals


def test_the_chunk_threshold_bounds_one_prompt_and_leaves_room_for_the_next() -> None:
    core = make_core(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    add(core, "a", prompt(9), max_tokens=1)
    add(core, "b", prompt(9, 1), max_tokens=1)
    run_dry(core)
    assert rows_of(core) == [{"a": 3, "b": 3}] * 3


def test_without_chunking_prompts_run_whole_and_an_oversized_one_alone() -> None:
    core = make_core(max_num_batched_tokens=8, enable_chunked_prefill=False)
    for name, length in (("a", 5), ("b", 4), ("c", 20), ("d", 2)):
        add(core, name, prompt(length, ord(name)), max_tokens=1)
    run_dry(core)
    assert rows_of(core) == [{"a": 5}, {"b": 4}, {"c": 20}, {"d": 2}]


def test_first_come_first_served_and_no_more_than_the_seats() -> None:
    core = make_core(max_num_seqs=2)
    for name in "abc":
        add(core, name, prompt(2, ord(name)), max_tokens=3, ignore_eos=True)
    run_dry(core)
    assert [sorted(rows) for rows in rows_of(core)] == [["a", "b"]] * 3 + [["c"]] * 3


def test_the_youngest_yields_when_blocks_run_out_and_keeps_its_place() -> None:
    core = make_core(num_blocks=6, block_size=2, prefix_caching=False)
    add(core, "old", prompt(4), max_tokens=8, ignore_eos=True, seed=1)
    add(core, "young", prompt(4, 1), max_tokens=4, ignore_eos=True, seed=2)
    done: dict[str, Collected] = {}
    while core.stats().preemptions == 0:
        gather(core.step(), done)
    add(core, "next", prompt(4, 2), max_tokens=1, ignore_eos=True, seed=3)
    run_dry(core, done)
    assert done["old:0"].end.preemptions == 0
    assert done["young:0"].end.preemptions >= 1
    starts = [a.request_id for plan in submitted(core) for a in plan.admitted]
    assert starts == ["old:0", "young:0", "young:0", "next:0"]
    alone = make_core()
    add(alone, "young", prompt(4, 1), max_tokens=4, ignore_eos=True, seed=2)
    assert done["young:0"].tokens == run_dry(alone)["young:0"].tokens


def test_a_preempted_request_recomputes_its_outputs_as_part_of_its_prompt() -> None:
    core = make_core(num_blocks=6, block_size=2, prefix_caching=False)
    add(core, "old", prompt(4), max_tokens=8, ignore_eos=True)
    add(core, "young", prompt(4, 1), max_tokens=4, ignore_eos=True)
    run_dry(core)
    admissions = [a for plan in submitted(core) for a in plan.admitted if a.request_id == "young:0"]
    assert len(admissions) == 2
    assert admissions[1].prompt_len == 4
    assert len(admissions[1].token_ids) > 4


def test_released_seats_are_announced_once_and_reused() -> None:
    core = make_core(max_num_seqs=1)
    for name in "ab":
        add(core, name, prompt(2, ord(name)), max_tokens=2, ignore_eos=True)
    run_dry(core)
    plans = submitted(core)
    assert [plan.released for plan in plans] == [[], [], [0], []]
    assert [a.seat for plan in plans for a in plan.admitted] == [0, 0]


def test_copies_of_a_whole_batch_travel_in_one_plan() -> None:
    core = make_core(max_num_seqs=8)
    shared = prompt(6)
    add(core, "first", shared, max_tokens=1)
    run_dry(core)
    for i in range(5):
        add(core, str(i), shared, max_tokens=3, ignore_eos=True, seed=i)
    run_dry(core)
    copies = [plan.copies for plan in submitted(core) if plan.copies]
    assert len(copies) == 1
    assert len(copies[0]) == 5
    assert {(c.src, c.tokens) for c in copies[0]} == {(copies[0][0].src, 2)}
    assert len({c.dst for c in copies[0]}) == 5


def test_stats_count_what_happened() -> None:
    core = make_core()
    add(core, "a", prompt(8), max_tokens=3, ignore_eos=True)
    add(core, "gone", prompt(8, 1), max_tokens=3, ignore_eos=True)
    core.abort(["gone:0"])
    done = run_dry(core)
    add(core, "b", prompt(8), max_tokens=2, ignore_eos=True)
    run_dry(core)
    stats = core.stats()
    assert done["gone:0"].reason is FinishReason.ABORT
    assert (stats.prompt_tokens, stats.generation_tokens, stats.requests) == (8 + 1, 3 + 2, 3)
    assert (stats.prefix_queries, stats.prefix_hits) == (16, 7)
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_total) == (0, 0, 0, 64)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", -1), ("long_prefill_token_threshold", -1)],
)
def test_limits_out_of_range_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=name):
        scheduler_config(**{name: value})
