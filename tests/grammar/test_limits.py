"""How deep JSON may be."""

from typing import Any

import pytest

from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import check_depth


def lists(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("value", [None, "text", 5, [], {}, {"a": [1, {"b": "c"}]}, lists(100), [1, lists(99)]])
def test_depths_that_are_allowed(value: Any) -> None:
    check_depth(value)


@pytest.mark.parametrize("value", [lists(101), {"a": lists(100)}, lists(100_000)])
def test_depths_that_are_not(value: Any) -> None:
    with pytest.raises(GrammarError, match="deeper than 100") as raised:
        check_depth(value)
    assert raised.value.code == "grammar_too_complex"
