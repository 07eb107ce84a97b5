"""Recorded arrivals: Azure LLM inference CSV, Mooncake JSON lines, and what roseinfer itself recorded."""

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError

MOONCAKE_BLOCK = 512
MOONCAKE_STEP_S = 3.0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace; `at_s` counts from the first. `blocks`: ids of the prompt's blocks of 512 tokens."""

    at_s: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()

    def prompt_ids(self, vocab: int) -> list[int]:
        """Tokens such that equal leading blocks give equal prefixes: each block begins with its id in two tokens,
        which is all that a chain of block hashes needs. Tokens behind the last block repeat one.
        """
        ids: list[int] = []
        for block in self.blocks:
            high, low = divmod(block, vocab - 3)
            ids += [3 + high % (vocab - 3), 3 + low, *[1] * (MOONCAKE_BLOCK - 2)]
        return (ids + [1] * (self.prompt_len - len(ids)))[: self.prompt_len]


def read_trace(path: str, *, seconds: float | None = None, speed: float = 1.0) -> list[TraceRequest]:
    """The first `seconds` of a trace (of its own time), played `speed` times as fast. Raises `ConfigError`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"trace: there is no file {path}")
    try:
        lines = list(_azure(file) if file.suffix == ".csv" else _json_lines(file))
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"trace: {path} cannot be read: {error!r}") from error
    if not lines:
        raise ConfigError(f"trace: {path} holds no request")
    lines.sort(key=lambda line: line.at_s)
    first = lines[0].at_s
    found = []
    for line in lines:
        at_s = line.at_s - first
        if seconds is None or at_s < seconds:
            found.append(TraceRequest(at_s / speed, line.prompt_len, line.output_len, line.blocks))
    return found


def _azure(file: Path) -> Iterator[TraceRequest]:
    """TIMESTAMP has 7 fractional digits; datetime keeps 6."""
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield TraceRequest(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _json_lines(file: Path) -> Iterator[TraceRequest]:
    """A recorded run has requests and, later, their ends, and its last line may be cut; all else is Mooncake's."""
    text = file.read_text()
    lines = text.splitlines()
    if text.startswith('{"setup"') and not text.endswith("\n"):
        lines.pop()
    rows = [json.loads(line) for line in lines]
    return _recorded(rows) if any("request" in row for row in rows) else _mooncake(rows)


def _mooncake(rows: list[dict[str, Any]]) -> Iterator[TraceRequest]:
    """Times are ms in steps of 3 s, spread here with a fixed seed."""
    rng = random.Random(0)
    for row in rows:
        at_s = row["timestamp"] / 1e3 + rng.random() * MOONCAKE_STEP_S
        yield TraceRequest(at_s, int(row["input_length"]), int(row["output_length"]), tuple(row.get("hash_ids", ())))


def _recorded(rows: list[dict[str, Any]]) -> Iterator[TraceRequest]:
    """The first sample of each request that came to its end."""
    tokens = {row["end"]: row["tokens"] for row in rows if "end" in row}
    for row in rows:
        outputs = tokens.get(f"{row['request']}:0") if "request" in row else None
        if outputs:
            yield TraceRequest(row["arrival_s"], len(row["prompt_ids"]), outputs)
