"""Work of steps, and the predicted costs of steps, prompts and copies."""

import pytest

from roseinfer.core.plan import Row
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.params import CostParams, Work


def test_features_of_a_plan() -> None:
    rows = [Row("a", 0, 9, 1, 1, True, 9, 0, ()), Row("b", 1, 4, 2, 0, False, 4, 0, ())]
    assert CostParams().work(rows) == Work(2, 5 + 6, 1, 10, 4)
    two = [row for start in (100, 30) for row in (rows[0], rows[1]._replace(start=start, count=5))]
    assert CostParams().work(two).prompt_context == 130 and CostParams().work(two).decode_context == 20
    assert CostParams().work([]) == Work()


def test_a_row_that_verifies_drafts_decodes_and_its_drafts_are_counted_apart() -> None:
    verifying = Row("c", 2, 20, 4, 4, True, 20, 0, (), (7, 8, 9))
    rows = [Row("a", 0, 9, 1, 1, True, 9, 0, ()), Row("b", 1, 4, 2, 0, False, 4, 0, ()), verifying]
    assert CostParams().work(rows) == Work(2, 5 + 6, 2, 10 + 21, 4, 3, 3 * 21)
    plain, drafted = Work(decode_rows=1, decode_context=21), CostParams().work([verifying])
    assert plain.features == drafted.features
    params = CostParams(drafts=DraftCost(5e-4, 3e-5, 2e-5, 1e-5, 1e-8))
    assert params.seconds(drafted) == pytest.approx(params.seconds(plain) + 5e-4 + 3 * 3e-5 + 63e-8)
    assert CostParams().seconds(drafted) > CostParams().seconds(plain) + 3 * CostParams().token_s, "until seen: dear"


@pytest.mark.parametrize(
    ("others", "drafts", "parts"),
    [(1, 4, (4, 0, 0)), (12, 8, (4, 4, 0)), (16, 8, (0, 8, 0)), (120, 16, (0, 8, 8)), (1, 200, (15, 112, 73))],
)
def test_drafts_are_told_apart_by_the_size_of_the_step(others: int, drafts: int, parts: tuple[int, ...]) -> None:
    work = Work(decode_rows=others, decode_context=9, draft_tokens=drafts, draft_context=11)
    assert work.draft_features == (1.0, *parts, 11, 0, 0)
    cost = DraftCost(1e-3, 1e-5, 2e-5, 3e-5, 0.0)
    each = sum(cost.one_more_s(tokens) for tokens in range(others, others + drafts))
    assert cost.seconds(work.draft_features) == pytest.approx(1e-3 + each)


def test_drafts_that_a_head_makes_cost_a_constant_for_each_step_of_the_longest_chain_and_each_draft() -> None:
    rows = [Row(name, 0, 9, 1, 1, True, 9, 0, ()) for name in "abc"]
    plain, drafting = CostParams().work(rows), CostParams().work(rows, (1, 0, 4))
    assert (drafting.head_steps, drafting.head_drafts) == (4, 5) and not plain.has_drafts and drafting.has_drafts
    assert plain.features == drafting.features
    params = CostParams(drafts=DraftCost(verify_s=1.0, head_step_s=2e-4, head_draft_s=3e-6))
    assert params.seconds(drafting) == pytest.approx(params.seconds(plain) + 4 * 2e-4 + 5 * 3e-6)
    assert CostParams().seconds(drafting) > CostParams().seconds(plain), "until seen: a guess"


@pytest.mark.parametrize("pair_s", [0.0, 3.9e-9])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 512), (20_000, 64), (511, 30_000)])
def test_prompt_tokens_that_fit_a_time_are_those_that_take_it(pair_s, start, count):
    params = CostParams(step_s=1e-3, token_s=17e-6, pair_s=pair_s, chunk_context_s=34e-9)
    whole = params.seconds(Work(count, count * start + count * (count + 1) / 2, prompt_context=start))
    assert params.prefill_s(start, count) == pytest.approx(whole - params.step_s)
    assert params.prefill_tokens(start, params.prefill_s(start, count)) == pytest.approx(count)


def test_a_chunk_pays_for_the_context_before_it_whatever_its_length():
    params = CostParams(token_s=10e-6, chunk_context_s=100e-9)
    assert params.prefill_s(20_000, 0) == 0.0
    assert params.prefill_s(20_000, 1) == pytest.approx(2e-3 + 10e-6)
    assert params.prefill_tokens(20_000, 1.9e-3) == params.prefill_tokens(20_000, 2e-3) == 0.0
    assert params.prefill_tokens(20_000, 3e-3) == pytest.approx(100)
    assert not params.is_worth_a_chunk(20_000, 7.9e-3) and params.is_worth_a_chunk(20_000, 8.1e-3)
    assert params.is_worth_a_chunk(0, 0.0) and CostParams().is_worth_a_chunk(20_000, 1e-9)


def test_no_prompt_tokens_fit_no_time():
    assert CostParams().prefill_tokens(100, 0.0) == CostParams().prefill_tokens(100, -1.0) == 0.0


# --- copies between the device and the host -------------------------------------------------------------------------
def test_the_two_directions_go_beside_each_other() -> None:
    params = CostParams(load_s=50e-6, store_s=100e-6)
    assert params.copies_s(400, 100) == pytest.approx(20e-3) and params.copies_s(100, 400) == pytest.approx(40e-3)
    assert params.slower(2.0).copies_s(1, 0) == pytest.approx(100e-6)
