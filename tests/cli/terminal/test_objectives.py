"""Objectives as people type them, and advice on rejections."""

import pytest

from roseinfer.cli.terminal.objectives import parse_objectives, shown_objectives
from roseinfer.cli.terminal.refusals import advice
from roseinfer.cli.terminal.remote import RefusedError
from roseinfer.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=200ms tpot=30ms", {"ttft_ms": 200, "tpot_ms": 30}),
        ("ttft=200, e2e=2.5s", {"ttft_ms": 200, "e2e_ms": 2500}),
        ("class=chat", {"class": "chat"}),
        ("off", {}),
        ("", {}),
    ],
)
def test_objectives(text: str, slo: dict[str, object]) -> None:
    assert parse_objectives(text) == slo
    assert parse_objectives(shown_objectives(slo)) == slo


@pytest.mark.parametrize("word", ["ttft", "ttft=", "ttft=0", "ttft=-5ms", "ttft=1e3", "tpop=30ms", "class=", "ttft=5m"])
def test_wrong_words_are_named(word: str) -> None:
    with pytest.raises(ConfigError, match=repr(word)):
        parse_objectives(f"tpot=30ms {word}")


def refusal(once: bool = False, **fields: object) -> list[str]:
    error = RefusedError(429, {"code": "slo_unattainable", "reason": "ttft", "cause": "queue", **fields})
    return list(advice(error, once=once))


def test_who_asked_once_is_told_options_and_no_commands() -> None:
    assert refusal(once=True, attainable_ms=301.2)[1] == "possible now: --slo ttft=320ms"
    assert refusal(once=True, cause="new") == ["try a looser objective (--slo), or none"]
    for code in ("loading", "queue_full", "context_length_exceeded"):
        (line,) = advice(RefusedError(503, {"code": code}), once=True)
        assert "/" not in line


def test_what_could_be_kept_is_offered_with_a_margin() -> None:
    assert refusal(attainable_ms=301.2, predicted_ttft_ms=900.0) == [
        "cause: the prompts ahead of it",
        "possible now: /slo ttft=320ms, then /retry",
    ]
    assert refusal(reason="tpot", attainable_ms=4.21)[1] == "possible now: /slo tpot=4.5ms, then /retry"
    assert "ttft=950ms" in refusal(predicted_ttft_ms=900.0)[1]


def test_where_nobody_knows_what_could_be_kept() -> None:
    assert refusal(reason="e2e", cause="new", predicted_ttft_ms=4.0) == [
        "try a looser objective (/slo) or none (/slo off), then /retry"
    ]


def test_other_refusals() -> None:
    assert "give the server's key" in " ".join(advice(RefusedError(401, {"code": "invalid_api_key"})))
    assert list(advice(RefusedError(400, {"code": None}))) == []
