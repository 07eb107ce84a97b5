"""Parametrization over products of values, of which `make test` runs a part and `make test-all` everything.

A run without the exhaustive tests does not collect the exhaustive cases, because each worker would make 10,000 items of
them.
"""

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings

MIN_EXAMPLES_SHARE, MIN_EXAMPLES_COUNT = 1 / 10, 10
_without_exhaustive = False

Axis = Mapping[str, Any] | Iterable[Any]


def pairwise(**axes: Axis) -> pytest.MarkDecorator:
    """Parametrize over the product of `axes`; cases beyond a cover of all pairs of values are exhaustive.

    An axis has the values of the argument with its name; of a mapping, the keys are their ids.
    """
    return _parametrized(axes, together=2)


def each_value(**axes: Axis) -> pytest.MarkDecorator:
    """Parametrize like `pairwise`, where the cases that are not exhaustive cover each value once."""
    return _parametrized(axes, together=1)


def leave_out_exhaustive(left_out: bool) -> None:
    """Leave out exhaustive cases and nine of ten examples, or none. Call before test modules are imported."""
    global _without_exhaustive
    _without_exhaustive = left_out


def examples(count: int, derandomize: bool = False) -> settings:
    """Return settings of a property with `count` examples, of which `make test` runs a tenth, but at least ten."""
    share = MIN_EXAMPLES_SHARE if _without_exhaustive else 1.0
    kept = max(min(count, MIN_EXAMPLES_COUNT), round(count * share))
    return settings(max_examples=kept, deadline=None, derandomize=derandomize)


def cases(names: str | tuple[str, ...], usual: Iterable[Any], exhaustive: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize over cases of which some are exhaustive."""
    rest = []
    for case in () if _without_exhaustive else exhaustive:
        values = case if isinstance(names, tuple) else (case,)
        rest.append(pytest.param(*values, marks=pytest.mark.exhaustive))
    return pytest.mark.parametrize(names, [*usual, *rest])


def _parametrized(axes: Mapping[str, Axis], together: int) -> pytest.MarkDecorator:
    columns = [_with_ids(axis) for axis in axes.values()]
    cases = list(product(*(range(len(column)) for column in columns)))
    usual = _cover(cases, min(together, len(columns)))
    params = []
    for case in sorted(usual) if _without_exhaustive else cases:
        ids, values = zip(*(column[index] for column, index in zip(columns, case, strict=True)), strict=True)
        marks = () if case in usual else pytest.mark.exhaustive
        params.append(pytest.param(*values, id="-".join(ids), marks=marks))
    return pytest.mark.parametrize(tuple(axes), params)


def _with_ids(axis: Axis) -> list[tuple[str, Any]]:
    items = axis.items() if isinstance(axis, Mapping) else ((value, value) for value in axis)
    return [(str(name).replace(", ", ",").replace("torch.", ""), value) for name, value in items]


def _cover(cases: list[tuple[int, ...]], together: int) -> set[tuple[int, ...]]:
    """Return few of the cases, in which each combination of `together` values of different axes is found."""
    groups = {case: set(combinations(enumerate(case), together)) for case in cases}
    missing = set().union(*groups.values())
    chosen: set[tuple[int, ...]] = set()
    while missing:
        best = max(cases, key=lambda case: len(groups[case] & missing))
        chosen.add(best)
        missing -= groups[best]
    return chosen
