"""Counts of values in a body before it is parsed. Text in strings does not count."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.server.http.body import check_counts
from roseinfer.server.http.errors import ApiError
from roseinfer.server.http.limits import Limits
from tests.server.live import LiveServer

REAL = Limits.of(ServerConfig())
SMALL = replace(REAL, max_json_objects=3, max_json_lists=4, max_json_strings=6, max_json_values=10)


def rejection(value: Any, limits: Limits = SMALL) -> str | None:
    try:
        check_counts(value if isinstance(value, bytes) else json.dumps(value).encode(), limits)
    except ApiError as error:
        assert (error.status, error.code) == (413, "too_many_values")
        return error.message
    return None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{}, {}, {}], None),
        ([{}, {}, {}, {}], "more than 3 objects"),
        ([[], [], []], None),
        ([[], [], [], []], "more than 4 lists"),
        ({"a": "b", "c": "d", "e": "f"}, None),
        ({"a": "b", "c": "d", "e": "f", "g": 1}, "more than 6 strings"),
        ([1] * 11, None),
        ([1] * 12, "more than 10 values"),
        (['{},[],"{' * 100, "\\" * 99, '\\"{{{{{{' * 50, "[[[[[[" * 50], None),
        (['{},[],"{' * 100, {}, {}, {}, {}], "more than 3 objects"),
        (['\\\\"{', "[" * 50, [], [], [], []], "more than 4 lists"),
    ],
)
def test_counts(value: Any, said: str | None) -> None:
    message = rejection(value)
    assert message is None if said is None else said in (message or "")


def count(value: Any) -> tuple[int, int, int]:
    """Return the numbers of objects, lists and strings."""
    if isinstance(value, str):
        return 0, 0, 1
    if isinstance(value, list):
        inner = [count(entry) for entry in value]
        return sum(c[0] for c in inner), 1 + sum(c[1] for c in inner), sum(c[2] for c in inner)
    inner = [count(entry) for entry in value.values()]
    return 1 + sum(c[0] for c in inner), sum(c[1] for c in inner), len(value) + sum(c[2] for c in inner)


def drawn(rng: random.Random, depth: int = 0) -> Any:
    text = "".join(rng.choices('a{}[],:"\\\n\u00e9', k=rng.randrange(8)))
    if depth == 3 or rng.random() < 0.4:
        return text
    if rng.random() < 0.5:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {text + str(i): drawn(rng, depth + 1) for i in range(rng.randrange(4))}


def test_random_documents_are_rejected_exactly_above_a_limit() -> None:
    rng = random.Random(28)
    seen = set()
    for _ in range(3000):
        value = drawn(rng)
        objects, lists, strings = count(value)
        wanted = objects > 3 or lists > 4 or strings > 6
        assert (rejection(value) is not None) is wanted, value
        seen.add(wanted)
    assert seen == {True, False}


def test_invalid_json_is_counted_too() -> None:
    for data in (b'"', b'"' * 99, b"\\" * 99, b'{"\\', b'{"a": "' + b"\\" * 99):
        rejection(data)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": '{[,\\"' * 200_000, "max_tokens": 1}, 400),  # longer than the context, but not too many values
        ({"prompt": "x", "unknown": [{}] * 20_000}, 413),
        ({"prompt": "x", "unknown": {f"n{i}": 1 for i in range(140_000)}}, 413),
        ({"prompt": "x", "unknown": [[]] * 70_000}, 413),
    ],
)
def test_a_server_rejects_them(server: LiveServer, body: dict[str, Any], status: int) -> None:
    answer = server.post("/v1/completions", body)
    assert answer.status_code == status
    assert (answer.json()["error"]["code"] == "too_many_values") is (status == 413)
