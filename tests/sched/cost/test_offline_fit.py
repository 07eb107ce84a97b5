"""The cost model fitted to measured steps, and its file."""

import json
import random
from dataclasses import replace

import pytest

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.file import cost_as_json, read_cost
from roseinfer.sched.cost.offline_fit import MIN_SAMPLES, CostSample, fit_cost
from roseinfer.sched.cost.params import CostParams, Work, pairs
from roseinfer.sched.estimates import FAST, Estimates
from roseinfer.sched.policies.slack.policy import SlackPolicy
from roseinfer.sched.registry import make_policy, options_of, scheduler_config

TRUE = CostParams(step_s=17.5e-3, token_s=85e-6, pair_s=2e-9, row_s=70e-6, context_s=0.16e-6, chunk_context_s=0.3e-6)


def draw(count: int, params: CostParams = TRUE, *, noise: float = 0.0, seed: int = 0) -> list[CostSample]:
    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        tokens, rows = rng.choice([0, rng.randrange(16, 2048)]), rng.randrange(200)
        start = rng.randrange(4000) if tokens else 0
        work = Work(tokens, pairs(start, tokens), rows, rows * rng.randrange(50, 2000), start)
        samples.append(CostSample(work, params.seconds(work) * (1 + rng.gauss(0, noise))))
    return samples


def error(found: CostParams) -> float:
    """The largest relative error over 200 steps it has not seen."""
    return max(abs(found.seconds(sample.work) / sample.seconds - 1) for sample in draw(200, seed=9))


def test_it_recovers_the_constants() -> None:
    fit = fit_cost(draw(200))
    assert fit.params.values() == pytest.approx(TRUE.values(), rel=1e-6)
    assert (fit.samples, fit.outliers) == (200, 0)
    assert fit.r2 == pytest.approx(1.0) and fit.mape < 1e-6 and abs(fit.worst) < 1e-6


def test_noise_costs_little() -> None:
    fit = fit_cost(draw(400, noise=0.03))
    assert error(fit.params) < 0.02
    assert 0.015 < fit.mape < 0.035 and fit.r2 > 0.98 and fit.outliers == 0


@pytest.mark.parametrize("factor", [0.05, 3.0, 40.0])
def test_outliers_do_not_move_it(factor: float) -> None:
    samples = draw(400, noise=0.02)
    for i in range(0, 400, 20):
        samples[i] = CostSample(samples[i].work, factor * samples[i].seconds)
    fit = fit_cost(samples)
    assert error(fit.params) < 0.02
    assert fit.outliers == 20 and fit.mape < 0.03 and abs(fit.worst) < 0.1
    assert abs(fit.worst_of_all) > 0.6, "they are not hidden"


def test_constants_are_never_negative() -> None:
    """Steps that become shorter with more rows: the best that is not absurd is no cost per row."""
    rng = random.Random(0)
    samples = [
        CostSample(Work(0, 0.0, rows, 0), 0.02 - 1e-4 * rows) for rows in (rng.randrange(1, 64) for _ in range(50))
    ]
    found = fit_cost(samples).params
    assert min(found.values()) >= 0 and found.row_s == 0 and 0.0137 <= found.step_s <= 0.02


def test_what_no_step_shows_costs_nothing() -> None:
    """No prompts, and one context for all rows: K is a multiple of Nd, so one of the two explains both."""
    samples = [CostSample(Work(0, 0.0, rows, 100 * rows), 0.01 + 2e-4 * rows) for rows in range(1, 41)]
    fit = fit_cost(samples)
    assert fit.params.token_s == fit.params.pair_s == 0
    assert fit.mape < 1e-6
    assert fit.params.row_s + 100 * fit.params.context_s == pytest.approx(2e-4)


def test_steps_with_drafts_show_what_these_add_and_nothing_else(tmp_path) -> None:
    true = replace(TRUE, drafts=DraftCost(1e-3, 50e-6, 10e-6, 20e-6, 0.0))
    works = [Work(0, 0.0, rows, 100 * rows, 0, rows * each) for rows in (1, 4, 16, 64, 200) for each in range(1, 8)]
    fit = fit_cost([*draw(200), *(CostSample(work, true.seconds(work)) for work in works)])
    assert replace(fit.params, drafts=None) == fit_cost(draw(200)).params and fit.samples == 200
    assert all(fit.params.drafts_s(work) == pytest.approx(true.drafts_s(work), rel=0.1) for work in works)
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost_as_json(fit.params)))
    assert read_cost(str(file)) == fit.params


def test_too_few_steps() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit_cost(draw(MIN_SAMPLES - 1))


# --- the file -----------------------------------------------------------------------------------------------------
def test_a_scheduler_begins_with_the_file(tmp_path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({**cost_as_json(TRUE), "fit": {"r2": 0.9}}))
    assert read_cost(str(file)) == TRUE
    policy = make_policy(scheduler_config(cost_model=str(file)))
    assert isinstance(policy, SlackPolicy) and policy.state.cost.params == TRUE
    slower = CostParams(*(1.2 * value for value in TRUE.values()))
    for sample in draw(300, slower):
        policy.state.cost.observe(sample.work, sample.seconds)
    work = Work(300, 50_000.0, 20, 10_000)
    assert policy.state.cost.seconds(work) == pytest.approx(slower.seconds(work), rel=0.03), "only the start of the fit"
    assert Estimates.of(options_of(SchedulerConfig())).cost.params == FAST


def test_what_a_like_engine_has_learnt_is_newer_than_the_file_and_given_up_sooner(tmp_path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost_as_json(CostParams())))
    known = replace(TRUE, pair_s=0.0, chunk_context_s=0.0)  # what a promise tells
    work = Work(600, pairs(3000, 600), 20, 10_000, 3000)
    errors = []
    for config in (scheduler_config(cost_model=str(file)), scheduler_config()):
        policy = make_policy(config, Estimates.of(options_of(config), known))
        assert isinstance(policy, SlackPolicy) and policy.state.cost.params == known
        for sample in draw(30):
            policy.state.cost.observe(sample.work, sample.seconds)
        errors.append(policy.state.cost.seconds(work) / TRUE.seconds(work) - 1)
    assert max(map(abs, errors)) < 0.05, "and learns what it was not told"
    Estimates.of(options_of(scheduler_config(scheduling_policy="fifo")), known)  # it has no use for it


def test_a_file_from_before_chunks_paid_for_their_contexts(tmp_path) -> None:
    file = tmp_path / "cost.json"
    older = cost_as_json(TRUE)["cost"]
    del older["chunk_context_s"]
    file.write_text(json.dumps({"cost": older}))
    assert read_cost(str(file)) == replace(TRUE, chunk_context_s=0.0)


def test_a_file_of_an_engine_without_host_memory(tmp_path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost_as_json(replace(TRUE, load_s=1e-6, store_s=2e-6))))
    assert read_cost(str(file)).load_s == 1e-6 and read_cost(str(file)).store_s == 2e-6
    file.write_text(json.dumps(cost_as_json(TRUE)))
    assert "load_s" not in file.read_text() and read_cost(str(file)) == TRUE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot read"),
        ("[]", "is not a cost model"),
        ('{"cost": 3}', "is not a cost model"),
        ('{"cost": {"step_s": 1.0}}', "token_s"),
        (json.dumps({"cost": {**cost_as_json(TRUE)["cost"], "row_s": -1.0}}), "row_s must be"),
        (json.dumps({"cost": {**cost_as_json(TRUE)["cost"], "row_s": float("nan")}}), "row_s = nan"),
        (json.dumps({"cost": {**cost_as_json(TRUE)["cost"], "row_s": "1"}}), "row_s must be"),
        (json.dumps({"cost": {**cost_as_json(TRUE)["cost"], "step_s": 0, "token_s": 0}}), "time would not advance"),
    ],
)
def test_files_that_are_none(content: str, message: str, tmp_path) -> None:
    file = tmp_path / "cost.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        make_policy(scheduler_config(cost_model=str(file)))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        read_cost("nowhere.json")
