"""Context reads: windows bound them, and recurrent states count as the K/V with as many bytes."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import Row, SlotCopy, StateChanges, StateSnapshot
from roseinfer.core.runner import ContextReads
from roseinfer.sched.cost.file import cost_as_json, read_cost
from roseinfer.sched.cost.offline_fit import CostSample, fit_cost
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.registry import options_of, scheduler_config

WINDOWS = ContextReads(((1000, 0.75), (100, 0.05)))
STATES = ContextReads(state_tokens=4000.0)
COST = CostParams(5e-3, 2e-5, 1e-9, 3e-5, 2e-8, 3e-8)


def decode(context: int, name: str = "a") -> Row:
    return Row(name, 0, context - 1, 1, 1, True, 0, 0, ())


def chunk(start: int, count: int) -> Row:
    return Row("b", 1, start, count, 0, False, 0, 0, ())


def test_layers_with_a_window_read_no_more_than_it() -> None:
    assert [WINDOWS.of(context) for context in (50, 100)] == [50, 100]
    assert WINDOWS.of(1000) == pytest.approx(0.95 * 1000 + 0.05 * 100)
    assert WINDOWS.of(5000) == pytest.approx(0.2 * 5000 + 0.75 * 1000 + 0.05 * 100)
    assert WINDOWS.of(50, 1000, 5000) == pytest.approx(sum(map(WINDOWS.of, (50, 1000, 5000))))


def test_a_step_reads_the_windows_of_its_rows_and_before_its_chunks() -> None:
    verifying = Row("c", 2, 4999, 4, 4, True, 0, 0, (), (7, 8, 9))
    rows = [decode(50), decode(5000), chunk(3000, 5), chunk(20, 8), verifying]
    plain, found = COST.work(rows), replace(COST, reads=WINDOWS).work(rows)
    assert (plain.decode_context, plain.prompt_context) == (10_050, 3020)
    assert found.decode_context == pytest.approx(WINDOWS.of(50, 5000, 5000))
    assert found.prompt_context == pytest.approx(WINDOWS.of(3000, 20))
    without = {"decode_context": 0, "prompt_context": 0}
    assert found._replace(**without) == plain._replace(**without)


def test_chunks_copies_and_snapshots_move_states() -> None:
    rows = [decode(50), chunk(300, 5), chunk(0, 8)]
    moved = StateChanges(copies=(SlotCopy(1, 2),), snapshots=(StateSnapshot(0, 1, 3),))
    assert COST.work(rows, states=moved) == COST.work(rows), "a model without states"
    with_states = replace(COST, reads=STATES)
    assert with_states.work(rows, states=moved) == COST.work(rows)._replace(prompt_context=300 + 3.5 * 4000)
    assert with_states.work(rows[:1]) == COST.work(rows[:1]), "part of row_s"


@pytest.mark.parametrize("reads", [WINDOWS, STATES])
@pytest.mark.parametrize("start", [0, 600, 4000])
def test_what_policies_plan_with_is_what_a_step_costs(reads: ContextReads, start: int) -> None:
    cost, context = replace(COST, reads=reads), start + 1
    step_s = cost.seconds(cost.work([]))
    row_s = cost.seconds(cost.work([decode(context)])) - step_s
    assert cost.one_row_s(context, 0) == pytest.approx(row_s)
    assert cost.alone_s(context) == pytest.approx(step_s + row_s)
    two_s = cost.seconds(cost.work([decode(context), decode(30, "z")])) - step_s
    assert cost.decode_s([context, 30]) == pytest.approx(two_s)
    chunk_s = cost.seconds(cost.work([chunk(start, 64)])) - step_s
    assert cost.prefill_s(start, 64) == pytest.approx(chunk_s)
    assert cost.prefill_tokens(start, chunk_s) == pytest.approx(64)


def test_a_chunk_pays_for_the_state_that_it_continues() -> None:
    cost = replace(COST, reads=STATES)
    state_s = 4000 * COST.chunk_context_s
    assert cost.prefill_tokens(0, 0.9 * state_s) == 0 < COST.prefill_tokens(0, 0.9 * state_s)
    assert not cost.is_worth_a_chunk(0, 3.9 * state_s) and cost.is_worth_a_chunk(0, 4.1 * state_s)


# --- learning -------------------------------------------------------------------------------------------------------
def rows_of_one_context(steps: int) -> Iterator[list[Row]]:
    rng = random.Random(1)
    for _ in range(steps):
        context = int(50 * 240 ** rng.random())
        yield [decode(context, str(n)) for n in range(rng.choice([1, 16, 64, 128]))]


def test_both_fits_find_what_layers_with_windows_cost_where_a_line_in_the_context_does_not() -> None:
    """Layers as in Gemma 3 27B: of 62, 52 have a window of 1,024 tokens."""
    gemma, rng = ContextReads(((1024, 52 / 62),)), random.Random(2)
    true = replace(CostParams(14e-3, 1e-4, 0.0, 25e-6, 2.4e-7), reads=gemma)
    errors = []
    for reads in (ContextReads(), gemma):
        model, samples = CostModel(replace(CostParams(), reads=reads), trust=1.0), []
        for rows in rows_of_one_context(800):
            seconds = true.seconds(true.work(rows)) * (1 + rng.gauss(0, 0.01))
            samples.append(CostSample(model.params.work(rows), seconds))
            model.observe(*samples[-1])
        late = [abs(error) for error in model.errors]
        errors.append((fit_cost(samples, None, reads).mape, sum(late) / len(late)))
    (line, online_line), (fit, online) = errors
    assert fit < 0.01 and online < 0.012
    assert line > 3 * fit and online_line > 3 * online


def test_an_engine_without_a_file_begins_with_the_bytes_that_rows_read() -> None:
    def prior(reads: ContextReads) -> CostParams:
        return Estimates.of(options_of(scheduler_config(scheduling_policy="slack")), reads=reads).cost.params

    plain, states, windows = map(prior, (ContextReads(), STATES, WINDOWS))
    assert plain == Estimates().cost.params
    state_s = 4000 * plain.context_s
    assert states.row_s == pytest.approx(plain.row_s + state_s)
    assert states.prefill_s(0, 64) == pytest.approx(plain.prefill_s(0, 64) + state_s)
    assert windows.one_row_s(5000, 0) < plain.one_row_s(5000, 0)


# --- files ----------------------------------------------------------------------------------------------------------
def written(tmp_path: Path, cost: dict) -> str:
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(cost))
    return str(file)


def test_a_file_keeps_what_rows_read_and_is_as_before_without(tmp_path: Path) -> None:
    for reads in (WINDOWS, STATES):
        cost = replace(COST, reads=reads)
        assert read_cost(written(tmp_path, cost_as_json(cost))) == cost
    assert "reads" not in cost_as_json(COST)["cost"]
    assert read_cost(written(tmp_path, cost_as_json(COST))) == COST


@pytest.mark.parametrize(
    "reads",
    [
        *(5, [], {"windows": []}, {"windows": [[9]], "state_tokens": 0}),
        {"windows": [[0, 0.5]], "state_tokens": 0},
        {"windows": [[9, 0.6], [5, 0.6]], "state_tokens": 0},
        {"windows": [], "state_tokens": -1},
    ],
)
def test_a_file_with_other_reads_is_refused(tmp_path: Path, reads: object) -> None:
    cost = cost_as_json(COST)["cost"] | {"reads": reads}
    with pytest.raises(ConfigError, match="reads must be windows and state_tokens"):
        read_cost(written(tmp_path, {"cost": cost}))


@pytest.mark.parametrize("step_s", [-1.0, 1e305, 10**400, "1", True])
def test_a_file_with_another_duration_is_refused(tmp_path: Path, step_s: object) -> None:
    cost = cost_as_json(COST)["cost"] | {"step_s": step_s}
    with pytest.raises(ConfigError, match="step_s must be seconds within"):
        read_cost(written(tmp_path, {"cost": cost}))


def test_an_older_file_of_the_model_is_a_first_guess(tmp_path: Path) -> None:
    options = options_of(scheduler_config(scheduling_policy="slack", cost_model=written(tmp_path, cost_as_json(COST))))
    known = Estimates.of(options, reads=STATES).cost
    assert known.params == replace(COST, reads=STATES)
    for _ in range(50):
        known.observe(Work(decode_rows=8, decode_context=8000), 7e-3)
    assert known.params.reads == STATES
