"""Costs of a model with experts: the number of experts read saturates, and so does the price of more tokens."""

import json
import random
from dataclasses import replace
from math import inf

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import ExpertChoice
from roseinfer.core.step_cost import StepCost
from roseinfer.sched.cost.file import cost_as_json, read_cost
from roseinfer.sched.cost.offline_fit import CostSample, fit_cost
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work, pairs
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.registry import options_of, scheduler_config

EXPERTS = ExpertChoice(128, 8)
# Qwen3-30B-A3B in FP8 on a GPU that reads 4.28 TB/s: weights as `speed` tables count them, and launches.
MOE = CostParams(1.4e-3, 15e-6, 2e-9, 8e-6, 23e-9, 23e-9, expert_s=53e-6, experts=EXPERTS)
DENSE = replace(MOE, expert_s=0.0, experts=None)


def draw(rng: random.Random) -> Work:
    """Steps as they come: few or many rows, and a chunk of a prompt in a third of them."""
    rows = rng.choice([1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256])
    tokens = rng.choice([0, 0, rng.choice([16, 64, 256, 1024])])
    start = rng.choice([0, 0, 2048]) if tokens else 0
    return Work(tokens, pairs(start, tokens), rows, rows * rng.randrange(100, 2000), start)


def samples(count: int = 400, noise: float = 0.02) -> list[CostSample]:
    rng = random.Random(3)
    return [CostSample(w, MOE.seconds(w) * (1 + rng.gauss(0, noise))) for w in (draw(rng) for _ in range(count))]


# --- how many are read ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tokens", "read"), [(0, 0), (1, 8), (8, 51.6), (64, 125.9), (256, 128), (inf, 128)])
def test_experts_that_a_layer_reads(tokens: float, read: float) -> None:
    assert EXPERTS.read(tokens) == pytest.approx(read, abs=0.06)


def test_the_formula_is_the_mean_of_independent_choices() -> None:
    rng, choice = random.Random(1), ExpertChoice(16, 3)
    for tokens in (1, 4, 9):
        seen = [len({e for _ in range(tokens) for e in rng.sample(range(16), 3)}) for _ in range(2000)]
        assert sum(seen) / 2000 == pytest.approx(choice.read(tokens), rel=0.02)


def test_all_of_them_for_each_token_is_no_special_case() -> None:
    assert [ExpertChoice(4, 4).read(n) for n in (0, 1, 5, inf)] == [0, 4, 4, 4]


# --- prices ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("beside", [0, 3, 40, 500])
def test_what_is_added_to_a_step_is_the_difference_of_two_steps(beside: int) -> None:
    rows = Work(0, 0.0, beside, 700 * beside)
    with_prompt = rows._replace(prompt_tokens=200, prompt_pairs=pairs(64, 200), prompt_context=64)
    with_row = rows._replace(decode_rows=beside + 1, decode_context=rows.decode_context + 900)
    without = MOE.seconds(rows)
    assert MOE.rows_s(beside, rows.decode_context) == pytest.approx(without)
    assert MOE.prefill_s(64, 200, beside) == pytest.approx(MOE.seconds(with_prompt) - without)
    assert MOE.one_row_s(900, beside) == pytest.approx(MOE.seconds(with_row) - without)


def test_drafts_read_experts_too() -> None:
    drafted = Work(decode_rows=4, decode_context=400, draft_tokens=12)
    assert MOE.seconds(drafted) - DENSE.seconds(drafted) == pytest.approx(MOE.expert_s * EXPERTS.read(16))


def test_with_all_experts_read_more_costs_what_it_does_without_experts() -> None:
    assert MOE.prefill_s(100, 50, inf) == DENSE.prefill_s(100, 50)
    assert MOE.one_row_s(100, inf) == DENSE.one_row_s(100, inf) == DENSE.one_row_s(100, 0)
    assert MOE.prefill_s(0, 64) > 4 * MOE.prefill_s(0, 64, inf)


@pytest.mark.parametrize("beside", [0, 8, 64, inf])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 16), (0, 512), (20_000, 64), (511, 30_000)])
def test_prompt_tokens_that_fit_a_time_are_those_that_take_it(start: int, count: int, beside: float) -> None:
    seconds = MOE.prefill_s(start, count, beside)
    assert MOE.prefill_tokens(start, seconds, beside) == pytest.approx(count, rel=1e-5)
    assert MOE.prefill_s(start, MOE.prefill_tokens(start, 0.9 * seconds, beside), beside) <= 0.9 * seconds * (1 + 1e-9)


def test_no_prompt_tokens_fit_a_time_in_which_no_expert_is_read() -> None:
    assert MOE.prefill_tokens(0, 0.0) == 0.0
    assert 0 < MOE.prefill_tokens(0, 4 * MOE.expert_s) < 1


@pytest.mark.parametrize("pace_s", [2e-3, 4e-3, 6e-3, 8e-3, 9.5e-3, 12e-3])
def test_the_line_near_a_full_machine_is_full_with_as_many_rows(pace_s: float) -> None:
    constant_s, expert_s = MOE.cost_tangent(pace_s, 500.0)
    each_s = MOE.one_row_s(500, inf) + expert_s
    rows = (pace_s - constant_s) / each_s
    assert MOE.rows_s(rows, 500 * rows) == pytest.approx(pace_s, rel=1e-4)
    for n in range(300):
        assert constant_s + n * each_s >= MOE.rows_s(n, 500 * n) - 2e-5, "it touches, and is above elsewhere"


def test_lines_where_no_row_fits_where_any_do_and_without_experts() -> None:
    assert MOE.cost_tangent(1e-3, 500.0) == (MOE.step_s, pytest.approx(8 * MOE.expert_s))
    assert MOE.cost_tangent(inf, 0.0) == (pytest.approx(MOE.step_s + 128 * MOE.expert_s), 0.0)
    assert DENSE.cost_tangent(1e-3, 500.0) == DENSE.cost_tangent(inf, 0.0) == (DENSE.step_s, 0.0)


def test_a_chunk_pays_for_experts_that_nobody_else_needs() -> None:
    own_s = 128 * MOE.expert_s
    assert not MOE.is_worth_a_chunk(0, 3.9 * own_s) and MOE.is_worth_a_chunk(0, 4.1 * own_s)
    assert MOE.is_worth_a_chunk(0, 0.05 * own_s, beside=128)


def test_a_slower_machine_reads_experts_more_slowly() -> None:
    work = Work(100, pairs(0, 100), 7, 700)
    assert MOE.slower(1.5).seconds(work) == pytest.approx(1.5 * MOE.seconds(work))


# --- learning -------------------------------------------------------------------------------------------------------
def worst(params: CostParams) -> float:
    """The largest relative error over steps of decoding rows alone."""
    works = [Work(0, 0.0, rows, 800 * rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    return max(abs(params.seconds(work) / MOE.seconds(work) - 1) for work in works)


def test_calibration_finds_what_an_expert_costs_where_a_line_in_the_rows_does_not() -> None:
    fit, line = fit_cost(samples(), EXPERTS), fit_cost(samples())
    assert fit.params.experts == EXPERTS and fit.params.expert_s == pytest.approx(MOE.expert_s, rel=0.03)
    assert fit.mape < 0.025 and fit.r2 > 0.99 and worst(fit.params) < 0.03
    assert line.params.experts is None
    assert line.mape > 4 * fit.mape and worst(line.params) > 0.3


def test_prompts_of_which_experts_are_all_the_cost_can_be_planned_with() -> None:
    """Policies divide by what a prompt token takes, and by files that say nothing for it, too."""
    true = replace(MOE, token_s=0.0, pair_s=0.0, chunk_context_s=0.0)
    fitted = fit_cost([CostSample(s.work, true.seconds(s.work)) for s in samples(60)], EXPERTS).params
    params = CostModel(replace(fitted, token_s=0.0, pair_s=0.0)).params
    assert params.prefill_tokens(0, 10e-3, 4) > 2048
    assert params.seconds(Work(2048, 0.0, 8)) == pytest.approx(true.seconds(Work(2048, 0.0, 8)), rel=0.01)


def test_what_the_engine_learns_while_it_runs() -> None:
    known = CostModel(replace(CostParams(), experts=EXPERTS, expert_s=1e-5), trust=1.0)
    line = CostModel(CostParams(), trust=1.0)
    for work, seconds in samples(1500):
        known.observe(work, seconds)
        line.observe(work, seconds)
    late = [sum(map(abs, list(model.errors)[-200:])) / 200 for model in (known, line)]
    assert late[0] < 0.03 and worst(known.params) < 0.06
    assert late[1] > 3 * late[0] and worst(line.params) > 0.3


def test_many_rows_for_hours_do_not_unlearn_what_few_cost() -> None:
    """If all experts are read, their cost cannot be told from the constant cost of steps."""
    model, rng = CostModel(MOE), random.Random(5)
    for i in range(20_000):
        rows = rng.randrange(100, 256)
        work = Work(200 if i % 7 == 0 else 0, pairs(0, 200) if i % 7 == 0 else 0.0, rows, rows * 800)
        model.observe(work, MOE.seconds(work) * (1 + rng.gauss(0, 0.02)))
    assert worst(model.params) < 0.1


# --- files and options ----------------------------------------------------------------------------------------------
def written(tmp_path, params: CostParams, **changes: object) -> str:
    file = tmp_path / "cost.json"
    cost = {**cost_as_json(params)["cost"], **changes}
    file.write_text(json.dumps({"cost": {name: value for name, value in cost.items() if value is not None}}))
    return str(file)


def test_a_file_keeps_the_experts_and_is_as_before_without(tmp_path) -> None:
    assert read_cost(written(tmp_path, MOE)) == MOE
    assert read_cost(written(tmp_path, DENSE)) == DENSE
    assert "expert" not in json.dumps(cost_as_json(DENSE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "a cost model needs"),
        ({"num_experts": 4}, "1 <= num_experts_per_tok <= num_experts"),
        ({"num_experts_per_tok": 0}, "1 <= num_experts_per_tok <= num_experts"),
        ({"num_experts": 128.0}, "must be integers"),
        ({"expert_s": -1.0}, "expert_s must be"),
    ],
)
def test_a_file_with_half_of_them_is_refused(tmp_path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cost(written(tmp_path, MOE, **changes))


def estimates(path: str | None, experts: ExpertChoice | None, learnt: CostParams | None = None) -> CostParams:
    given = {"cost_model": path} if path else {}
    return Estimates.of(options_of(scheduler_config(scheduling_policy="slack", **given)), learnt, experts).cost.params


def test_the_model_says_which_experts_there_are(tmp_path) -> None:
    assert estimates(None, EXPERTS).experts == EXPERTS and estimates(None, None).experts is None
    assert estimates(None, EXPERTS).seconds(Work(0, 0.0, 256, 0)) < 4e-3, "nobody is turned away for a guess"
    assert estimates(written(tmp_path, MOE), EXPERTS) == MOE
    old = written(tmp_path, DENSE)
    assert estimates(old, EXPERTS) == replace(DENSE, experts=EXPERTS), "measured before experts were told apart"
    learnt = CostParams.of(StepCost(1e-3, 2e-6, 3e-6, 4e-9, expert_s=3e-6))
    assert learnt == CostParams(1e-3, 2e-6, row_s=3e-6, context_s=4e-9, expert_s=3e-6)
    assert learnt.published == StepCost(1e-3, 2e-6, 3e-6, 4e-9, 3e-6)
    assert estimates(old, EXPERTS, learnt) == replace(learnt, experts=EXPERTS)


@pytest.mark.parametrize(("experts", "has"), [(None, "none"), (ExpertChoice(8, 2), "2 of 8")])
def test_a_cost_model_of_other_experts_is_refused(tmp_path, experts, has) -> None:
    with pytest.raises(ConfigError, match=f"8 of 128 experts a token; this one has {has}"):
        estimates(written(tmp_path, MOE), experts)
