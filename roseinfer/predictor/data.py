"""Prompts and the lengths of the answers to them, from JSON lines."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError

MOST_BAD = 0.1  # of the rows: more are no slips
LEAST_ROWS = 50
SHOWN = 3


class BadRowError(ValueError):
    """A row that says nothing; the message says why."""


@dataclass(slots=True)
class Rows:
    """`prompts` as token ids and `lengths` in tokens, row by row; `bad`: what was left out and why, by line."""

    prompts: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths)

    def complaint(self) -> str:
        """`3 rows left out: line 7: ...; ...`"""
        more = f"; and {len(self.bad) - SHOWN} more" if len(self.bad) > SHOWN else ""
        return f"{len(self.bad)} rows left out: {'; '.join(self.bad[:SHOWN])}{more}"


def read_rows(path: str, encode: Callable[[str], list[int]]) -> Rows:
    """Rows that say nothing are left out. Raises `ConfigError` if they are many, or too few are left.

    `encode` turns a prompt that is text into token ids.
    """
    found = Rows()
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    _take(found, text, f"line {number}", encode)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if len(found.bad) > MOST_BAD * (len(found) + len(found.bad)):
        raise ConfigError(f"{path}: {found.complaint()}; of {len(found) + len(found.bad)}, that is too many")
    if len(found) < LEAST_ROWS:
        raise ConfigError(f"{path} has {len(found)} rows to learn from; {LEAST_ROWS} are needed at least")
    return found


def _take(found: Rows, text: str, where: str, encode: Callable[[str], list[int]]) -> None:
    try:
        prompt, length = _parse(text, encode)
    except BadRowError as error:
        found.bad.append(f"{where}: {error}")
        return
    found.prompts.append(prompt)
    found.lengths.append(length)


def _parse(text: str, encode: Callable[[str], list[int]]) -> tuple[list[int], int]:
    try:
        row: Any = json.loads(text)
    except ValueError as error:
        raise BadRowError(f"no JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRowError("no JSON object")
    length = row.get("output_len")
    if type(length) is not int or length < 1:
        raise BadRowError(f"output_len must be a positive integer, got {length!r}")
    if "prompt_token_ids" in row:
        prompt = row["prompt_token_ids"]
        if not isinstance(prompt, list) or not all(type(token) is int and 0 <= token < 2**31 for token in prompt):
            raise BadRowError("prompt_token_ids must be a list of token ids")
    elif isinstance(row.get("prompt"), str):
        prompt = encode(row["prompt"])
    else:
        raise BadRowError("neither prompt (text) nor prompt_token_ids")
    if not prompt:
        raise BadRowError("the prompt is empty")
    return prompt, length
