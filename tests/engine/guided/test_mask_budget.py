"""Debts of constraints: forgiveness, the requests that end, and the limit per step."""

from roseinfer.engine.guided.mask_budget import (
    FREE_ROW_S,
    MAX_REQUEST_DEBT_S,
    MAX_STEP_DEBT_S,
    MIN_REQUEST_S,
    REQUEST_SHARE,
    MaskBudget,
)


def steps_until_the_end(cost_s: float, other_s: float, rows: int = 1, steps: int = 2000) -> int | None:
    budget = MaskBudget()
    for step in range(steps):
        budget.begin_step(other_s)
        if budget.charge("a", cost_s, rows):
            return step
    return None


def test_a_burst_is_allowed_once() -> None:
    assert steps_until_the_end(MAX_REQUEST_DEBT_S, 0.01) == 1
    assert steps_until_the_end(MAX_REQUEST_DEBT_S + 2 * FREE_ROW_S, 0.01) == 0


def test_what_a_step_forgives_grows_with_the_step() -> None:
    other_s = 0.1
    assert steps_until_the_end(REQUEST_SHARE * other_s, other_s) is None
    assert steps_until_the_end(REQUEST_SHARE * other_s, other_s / 4) is not None
    assert steps_until_the_end(MIN_REQUEST_S, 0.0) is None


def test_each_row_has_some_free_time() -> None:
    assert steps_until_the_end(200 * FREE_ROW_S, 0.0, rows=200) is None
    assert steps_until_the_end(200 * FREE_ROW_S, 0.0, rows=1) is not None


def test_requests_within_their_own_budgets_share_one() -> None:
    budget = MaskBudget()
    ended: list[str] = []
    names = {f"r{i}" for i in range(20)}
    for _ in range(500):
        budget.begin_step(0.01)
        for name in sorted(names):
            for gone in budget.charge(name, 0.004 if name != "r7" else 0.008):
                ended.append(gone)
                names.discard(gone)
    assert ended[0] == "r7"
    assert 0 < len(names) * 0.004 <= 0.012, "those that remain fit"


def test_every_step_is_bounded_for_any_distribution_of_charges() -> None:
    budget = MaskBudget()
    budget.begin_step(0.01)
    live = [f"r{i}" for i in range(100)]
    spent_s = 0.0
    for name in live:
        for _ in range(50):  # samples of 5 ms each
            spent_s += 0.005
            if name in budget.charge(name, 0.005):
                break
    assert spent_s < MAX_STEP_DEBT_S + 0.005 * len(live) + 0.01
    assert not budget.charge("innocent", 60e-6), "what costs next to nothing does not end, however late it comes"


def test_a_request_that_has_paid_is_forgotten() -> None:
    budget = MaskBudget()
    budget.begin_step(0.01)
    budget.charge("a", 0.1)
    for _ in range(200):
        budget.begin_step(0.01)
    assert not budget.charge("a", MAX_REQUEST_DEBT_S)
