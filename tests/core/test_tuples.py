"""The tuples that are made without their own constructor, and taken apart by position, have all of their fields."""

from dataclasses import fields
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

import pytest

from roseinfer.core.outputs import OutputFields, SequenceOutput, new_output
from roseinfer.core.plan import Row, RowFields, RowResult, RowResultFields, new_row, new_row_result
from tests.helpers.engines import add, make_core
from tests.helpers.fake_runner import FakeRunner

FAST = [
    (Row, RowFields, new_row, ("a", 1, 2, 1, 1, True, 2, 0, (), ())),
    (RowResult, RowResultFields, new_row_result, ("a", (1,), None, None, None, None)),
    (SequenceOutput, OutputFields, new_output, ("a", (1,), None, None, None, None, ())),
]


@pytest.mark.parametrize(("made", "field_types", "make", "values"), FAST)
def test_the_type_of_the_arguments_names_every_field(made, field_types, make, values):
    """mypy compares what callers pass with this type, so a field that is added here alone fails at each of them."""
    assert list(get_args(field_types)) == list(get_type_hints(made).values())
    assert make(values) == made(*values)
    assert type(make(values)) is made and len(make(values)) == len(made._fields)


class LengthsRunner(FakeRunner):
    """Runner that stores the results that it returned."""

    def collect(self, handle):
        result = super().collect(handle)
        self.results = [*getattr(self, "results", []), *result.rows]
        return result


@pytest.mark.parametrize("depth", [1, 2])
def test_what_an_engine_makes_of_them_is_whole(depth):
    """Also at call sites that no type checker looks at."""
    runner = LengthsRunner(64, 4)
    core = make_core(depth=depth, runner=runner)
    for name in "ab":
        add(core, name, [1, 2, 3, 4, 5], max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outputs = []
    while core.busy:
        outputs += core.step()
    rows = [row for plan in runner.submitted for row in plan.rows]
    for kind, made in ((Row, rows), (RowResult, runner.results), (SequenceOutput, outputs)):
        assert len(made) >= 12 and {len(one) for one in made} == {len(kind._fields)}
        for one in made:
            for name, hint in get_type_hints(kind).items():
                assert isinstance(getattr(one, name), _classes(hint)), (kind, name)


def _classes(hint) -> tuple[type, ...]:
    if get_origin(hint) is UnionType:
        return tuple(found for part in get_args(hint) for found in _classes(part))
    return (NoneType,) if hint is NoneType else (get_origin(hint) or hint,)


def test_columns_are_the_fields_of_a_row():
    from roseinfer.runner.forward import Columns

    assert [field.name for field in fields(Columns)][2:] == list(Row._fields)
