"""Drafting with proposers of options: engines whose requests help to guess each other's tokens, or must not."""

import pytest

from roseinfer.core.config.speculation import AutoValues, MethodValues, NgramValues, SuffixValues
from roseinfer.core.request import Request
from roseinfer.engine.core import EngineCore
from roseinfer.sched.drafting.build import make_drafting
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.proposers.index_budget import MAX_INDEXED_TOKENS, IndexBudget
from tests.helpers.drafters import EveryDraft
from tests.helpers.engines import add, make_core, run_dry, submitted

PROMPT = [5, 9, 2, 7, 11, 30, 8]


def run_alone(core: EngineCore, name: str, salt: str = "") -> tuple[int, list[int]]:
    """Run a request. Return how many steps it took, and its output."""
    before = len(submitted(core))
    add(core, name, PROMPT, ignore_eos=True, seed=1, max_tokens=40, salt=salt)
    output = run_dry(core)[f"{name}:0"].tokens
    return len(submitted(core)) - before, output


def run_twice(drafting: Drafting, salt: str = "") -> tuple[int, int]:
    """Run a request, then the same one with a salt. Return the steps of both."""
    _, wanted = run_alone(make_core(), "a")
    core = make_core(drafting=drafting)
    first, output = run_alone(core, "a")
    second, again = run_alone(core, "b", salt)
    assert output == again == wanted
    return first, second


def test_a_finished_output_makes_the_same_request_faster() -> None:
    first, second = run_twice(make_drafting(AutoValues(), EveryDraft()))
    assert first >= 38 and second <= 8


@pytest.mark.parametrize(
    ("values", "share", "salt"),
    [
        (SuffixValues(), True, "x"),
        (SuffixValues(), False, ""),
        (SuffixValues(corpus=0), True, ""),
        (NgramValues(), True, ""),
    ],
    ids=["other salt", "no prefix cache", "no corpus", "own tokens only"],
)
def test_outputs_are_not_shared(values: MethodValues, share: bool, salt: str) -> None:
    first, second = run_twice(make_drafting(values, EveryDraft(), share_outputs=share), salt=salt)
    assert first == second


def test_the_option_bounds_the_drafts_of_a_row() -> None:
    drafting = make_drafting(AutoValues(tokens=2), EveryDraft())
    core = make_core(drafting=drafting)
    for name in ("a", "b"):
        run_alone(core, name)
    assert max(len(row.drafts) for plan in submitted(core) for row in plan.rows) == 2


class _Indexer:
    """Proposer that guesses nothing and would index as many tokens as it may."""

    def __init__(self, budget: IndexBudget) -> None:
        self._budget = budget
        self.granted: list[int] = []

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> None:
        self.granted.append(self._budget.take(MAX_INDEXED_TOKENS))

    def ended(self, request: Request) -> None:
        pass


def test_each_step_has_a_new_budget_of_tokens_to_index() -> None:
    budget = IndexBudget()
    indexer = _Indexer(budget)
    run_alone(make_core(drafting=Drafting((indexer,), EveryDraft(), index_budget=budget)), "a")
    assert len(indexer.granted) > 30 and set(indexer.granted) == {indexer.granted[0]}
