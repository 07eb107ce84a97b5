"""Training data: prompts and the lengths of their answers, from JSON lines or a recorded run."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError, reason_of
from roseinfer.predictor.recorded import RecordedOutputs, is_recorded

MAX_BAD_SHARE = 0.1  # of the rows
MIN_ROWS = 50
MAX_SHOWN = 3


class BadRowError(ValueError):
    """An unusable row; the message gives the reason."""


@dataclass(slots=True)
class TrainingRows:
    """`prompts` as token ids, `lengths` in tokens and whether `max_tokens` `cut` them, row by row.

    `bad`: what was left out and why, by line; `left_out`: outputs of a recorded run that say nothing, by reason.
    """

    prompts: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, prompt: list[int], length: int, cut: bool = False) -> None:
        self.prompts.append(prompt)
        self.lengths.append(length)
        self.cut.append(cut)

    def complaint(self) -> str:
        """Return a text such as `3 rows left out: line 7: ...; ...`."""
        more = f"; and {len(self.bad) - MAX_SHOWN} more" if len(self.bad) > MAX_SHOWN else ""
        return f"{len(self.bad)} rows left out: {'; '.join(self.bad[:MAX_SHOWN])}{more}"

    def remarks(self) -> list[str]:
        """Return remarks about the data, a sentence each."""
        found = [self.complaint()] if self.bad else []
        if self.left_out:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))
            found.append(f"outputs that did not end by themselves, left out: {reasons}")
        if any(self.cut):
            found.append(f"{sum(self.cut)} of {len(self)} outputs were cut by max_tokens: counted as longer")
        return found


def read_rows(path: str, encode: Callable[[str], list[int]], vocab_size: int | None = None) -> TrainingRows:
    """Read the usable rows. Raise `ConfigError` if many are unusable, or too few are left.

    `encode` turns a text prompt into token ids; ids of `vocab_size` or more make a row unusable.
    """
    found, recording = TrainingRows(), RecordedOutputs()
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    _take(found, recording, text, f"line {number}", encode, vocab_size)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path!r}: {reason_of(error)}") from error
    recording.close()
    found.left_out = {reason: count for reason, count in recording.left_out.items() if count}
    _check(path, found)
    return found


def _check(path: str, found: TrainingRows) -> None:
    if len(found.bad) > MAX_BAD_SHARE * (len(found) + len(found.bad)):
        raise ConfigError(f"{path}: {found.complaint()}; of {len(found) + len(found.bad)}, that is too many")
    whole = len(found) - sum(found.cut)
    if whole < MIN_ROWS:
        remarks = "".join(f"; {remark}" for remark in found.remarks())
        raise ConfigError(f"{path} has {whole} rows to learn from; {MIN_ROWS} are needed at least{remarks}")


def _take(
    found: TrainingRows,
    recording: RecordedOutputs,
    text: str,
    where: str,
    encode: Callable[[str], list[int]],
    vocab_size: int | None,
) -> None:
    try:
        row = _object(text)
        if is_recorded(row):
            prompt, length, cut = _recorded(recording, row)
        else:
            prompt, length = _parse(row, encode)
            cut = row.get("finish_reason") == "length"
        if vocab_size is not None and max(prompt, default=0) >= vocab_size:
            raise BadRowError(f"token id {max(prompt)} is outside the vocabulary of {vocab_size} (another model's?)")
    except BadRowError as error:
        found.bad.append(f"{where}: {error}")
        return
    if length:
        found.add(prompt, length, cut)


def _object(text: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(text)
    except ValueError as error:
        raise BadRowError(f"no JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRowError("no JSON object")
    return row


def _recorded(recording: RecordedOutputs, row: dict[str, Any]) -> tuple[list[int], int, bool]:
    """Return length 0: the output has not ended."""
    try:
        ended = recording.take(row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRowError(f"no line of a recorded run ({error!r})") from error
    return ([], 0, False) if ended is None else (ended.prompt, ended.length, ended.cut)


def _parse(row: dict[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[int], int]:
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
