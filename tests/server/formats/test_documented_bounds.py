"""Bounds of request fields in the table of docs/reference/api.md: the server accepts them, and no more."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.sampling import INT64_MAX, INT64_MIN
from tests.server.live import LiveServer

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "api.md"
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}
DEFAULT_MAX_TOKENS = 16
NUMBER = r"(-?\d+(?:\.\d+)?)"


def rules() -> dict[str, str]:
    """Return the rule of each field. Options of the server are replaced by their defaults.

    A row of several fields has one rule for each, between semicolons, or one for all.
    """
    found: dict[str, str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or cells[3] not in ("C", "H", "C H"):
            continue
        names, rule = re.findall(r"`(\w+)`", cells[0]), _with_defaults(cells[2])
        parts = rule.split("; ")
        found |= dict(zip(names, parts if len(parts) == len(names) > 1 else [rule] * len(names), strict=True))
    return found


def _with_defaults(rule: str) -> str:
    config = ServerConfig()
    rule = rule.replace("`max_tokens`", str(DEFAULT_MAX_TOKENS)).replace("signed 64 bit", f"{INT64_MIN} to {INT64_MAX}")
    return re.sub(r"`--(max-[a-z-]+)`", lambda flag: str(getattr(config, flag[1].replace("-", "_"))), rule)


RULES = rules()


class Range(NamedTuple):
    """Numbers that a field may have. `step`: distance of the nearest number that is refused."""

    path: str = COMPLETION
    step: float = 1
    more: dict[str, Any] = {}  # noqa: RUF012


class Size(NamedTuple):
    """Largest size of a field. `rule`: where the row says it. `make`: returns a value of a size."""

    rule: str
    make: Callable[[int], Any]


REAL = Range(step=0.001)
TIME_LIMITS = {"timeout_s", "deadline_ms"}  # the least of them may pass before the answer
RANGES = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), REAL),
    **dict.fromkeys(("repetition_penalty", "timeout_s", "deadline_ms"), REAL),
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs"), Range()),
    **dict.fromkeys(("stream_interval", "priority"), Range()),
    "max_completion_tokens": Range(CHAT),
    "top_logprobs": Range(CHAT, more={"logprobs": True}),
}
SIZES = [
    ("prompt", Size(r"at most (\d+)", lambda size: ["x"] * size)),
    ("logit_bias", Size(r"at most (\d+) entries", lambda size: {f"{i % 300:0{3 + i // 300}}": 1 for i in range(size)})),
    ("bad_words", Size(r"up to (\d+) words", lambda size: ["a"] * size)),
    ("allowed_token_ids", Size(r"to (\d+) ids", lambda size: [1] * size)),
    ("stop", Size(r"up to (\d+) of", lambda size: ["a"] * size)),
    ("stop", Size(r"most (\d+) characters", lambda size: "x" * size)),
    ("stop_token_ids", Size(r"at most (\d+)", lambda size: [1] * size)),
    ("cache_salt", Size(r"to (\d+) characters", lambda size: "x" * size)),
    ("request_id", Size(r"to (\d+) visible", lambda size: "x" * size)),
]
# Bounds that depend on the context, are those of another page or are no bounds.
ELSEWHERE = {"truncate_prompt_tokens", "logit_bias", "messages", "model", "return_tokens_as_token_ids"}


def bounds(rule: str) -> tuple[float, float | None, bool]:
    """Return the lowest number, the highest one if there is one, and True if the lowest one is excluded."""
    within = re.search(rf"above {NUMBER} up to {NUMBER}|{NUMBER}(?: \([a-z]+\))? to {NUMBER}", rule)
    if within is not None:
        above, most, low, high = within.groups()
        return (_number(above), _number(most), True) if above else (_number(low), _number(high), False)
    least = re.search(rf"(at least|above) {NUMBER}", rule)
    assert least is not None, f"no bound in {rule!r}"
    return _number(least[2]), None, least[1] == "above"


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


def status(server: LiveServer, path: str, fields: dict[str, Any]) -> tuple[int, str | None]:
    answer = server.post(path, BODIES[path] | fields)
    return answer.status_code, answer.json()["error"]["param"] if answer.status_code == 400 else None


@pytest.mark.parametrize("name", RANGES)
def test_numbers(server: LiveServer, name: str) -> None:
    path, step, more = RANGES[name]
    low, high, above = bounds(RULES[name])
    inside = [low + (1 if high is None else step) if above else low, *([] if high is None else [high])]
    outside = [low if above else low - step, *([] if high is None else [high + step])]
    accepted = [(200, None), (504, None)] if name in TIME_LIMITS else [(200, None)]
    for value in inside:
        assert status(server, path, {**more, name: value}) in accepted, (name, value)
    for value in outside:
        assert status(server, path, {**more, name: value}) == (400, name), (name, value)


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_sizes(server: LiveServer, name: str, size: Size) -> None:
    found = re.search(size.rule, RULES[name])
    assert found is not None, f"{size.rule!r} is not in the row of {name}: {RULES[name]!r}"
    most = int(found[1])
    assert status(server, COMPLETION, {name: size.make(most)}) == (200, None)
    assert status(server, COMPLETION, {name: size.make(most + 1)}) == (400, name)


def test_the_sum_of_banned_words(server: LiveServer) -> None:
    found = re.search(r"(\d+) characters and (\d+) tokens", RULES["bad_words"])
    assert found is not None
    for chars, said in ((int(found[1]) + 1, f"more than {found[1]} characters"), (int(found[1]), f"{found[2]} tokens")):
        answer = server.post(COMPLETION, {"prompt": "x", "bad_words": ["x" * chars]})
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_every_bound_of_the_table_is_tried() -> None:
    tried = RANGES.keys() | {name for name, _ in SIZES} | ELSEWHERE
    assert {name for name, rule in RULES.items() if re.search(r"\d", rule)} - tried == set()
