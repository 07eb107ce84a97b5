"""Parametrization of tests over products: everything by `make test-all`, a cover of it by `make test`."""

from collections.abc import Iterator
from itertools import combinations, product

import pytest

from tests.helpers.cases import cases, each_value, leave_out_exhaustive, pairwise

AXES = {"a": [1, 2, 3, 4], "b": {"yes": True, "no": False}, "c": "xyz"}
VALUES = [AXES["a"], [True, False], list(AXES["c"])]


@pytest.fixture(autouse=True)
def everything(request: pytest.FixtureRequest) -> Iterator[None]:
    leave_out_exhaustive(False)
    yield
    leave_out_exhaustive(request.config.option.markexpr == "not exhaustive")


def usual(mark) -> list[tuple]:
    return [param.values for param in mark.args[1] if not param.marks]


def test_every_case_is_there_and_named_by_its_values():
    for mark in (pairwise(**AXES), each_value(**AXES)):
        names, params = mark.args
        assert names == ("a", "b", "c") and [param.values for param in params] == list(product(*VALUES))
        assert params[0].id == "1-yes-x" and params[-1].id == "4-no-z"


def test_usual_cases_cover_all_pairs():
    found = usual(pairwise(**AXES))
    assert len(found) < 4 * 2 * 3 and len(found) >= 4 * 3
    for first, second in combinations(range(3), 2):
        pairs = {(case[first], case[second]) for case in found}
        assert pairs == set(product(VALUES[first], VALUES[second]))


def test_usual_cases_cover_each_value():
    found = usual(each_value(**AXES))
    assert len(found) == 4
    assert [{case[axis] for case in found} for axis in range(3)] == [set(values) for values in VALUES]


def test_listed_cases():
    names, params = cases("n", [1, 2], exhaustive=[3]).args
    assert names == "n" and params[:2] == [1, 2] and params[2].values == (3,) and params[2].marks
    names, params = cases(("n", "m"), [(1, 2)], exhaustive=[(3, 4)]).args
    assert params[1].values == (3, 4) and params[1].marks


def test_exhaustive_cases_are_left_out():
    expected = [usual(pairwise(**AXES)), usual(each_value(**AXES)), [1, 2]]
    leave_out_exhaustive(True)
    found = [[param.values for param in make(**AXES).args[1]] for make in (pairwise, each_value)]
    assert [*found, cases("n", [1, 2], exhaustive=[3]).args[1]] == expected
