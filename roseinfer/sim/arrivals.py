"""Arrivals of a simulation: from the options, or from a trace.

Traces are Azure LLM inference CSV, Mooncake JSON lines, or recordings of roseinfer itself.
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.setups import Setup
from roseinfer.sim.workload import VOCAB_COUNT, Arrival, RequestMix, UniformLengths, bursts, gamma, poisson

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_STEP_S = 3.0
# A prompt is a list in memory; no model has a context of so many tokens.
MAX_PROMPT_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `at_s` counts from the first line. `blocks`: ids of the prompt's blocks of 512 tokens."""

    at_s: float
    prompt_len: int
    output_len: int
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (isfinite(self.at_s) and self.prompt_len > 0 and self.output_len >= 0):
            found = f"{self.at_s:g} s, {self.prompt_len} and {self.output_len} tokens"
            raise ValueError(f"a request must have a finite time, a prompt and no negative output, got {found}")
        if self.prompt_len > MAX_PROMPT_TOKENS:
            raise ValueError(f"a prompt has at most {MAX_PROMPT_TOKENS} tokens, got {self.prompt_len}")

    def prompt_ids(self, vocab: int) -> list[int]:
        """Return tokens such that equal leading blocks give equal prefixes.

        Each block begins with its id in two tokens, which is enough for a chain of block hashes. Tokens after the last
        block repeat one token.
        """
        ids: list[int] = []
        for block in self.blocks:
            high, low = divmod(block, vocab - 3)
            ids += [3 + high % (vocab - 3), 3 + low, *[1] * (MOONCAKE_BLOCK_TOKENS - 2)]
        return (ids + [1] * (self.prompt_len - len(ids)))[: self.prompt_len]


def read_trace(path: str, *, seconds: float | None = None, speed: float = 1.0) -> list[TraceRequest]:
    """Read the first `seconds` of a trace (in its own time), played `speed` times as fast. Raise `ConfigError`."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"trace: no such file: {path!r}")
    try:
        lines = list(_azure(file) if file.suffix == ".csv" else _json_lines(file))
    except OSError as error:
        raise ConfigError(f"trace: cannot read {path!r}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"trace: {path!r} is no trace: {error} is missing") from error
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise ConfigError(f"trace: {path!r} is no trace: {error}") from error
    if not lines:
        raise ConfigError(f"trace: {path} has no requests")
    lines.sort(key=lambda line: line.at_s)
    first = lines[0].at_s
    found = []
    for line in lines:
        at_s = line.at_s - first
        if seconds is None or at_s < seconds:
            found.append(TraceRequest(at_s / speed, line.prompt_len, line.output_len, line.blocks))
    return found


def _azure(file: Path) -> Iterator[TraceRequest]:
    """Read Azure's CSV. TIMESTAMP has 7 fractional digits, of which datetime keeps 6."""
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield TraceRequest(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _json_lines(file: Path) -> Iterator[TraceRequest]:
    """Read JSON lines: a recorded run has requests and their ends, and a last line that may be cut; else Mooncake's."""
    text = file.read_text()
    lines = text.splitlines()
    if text.startswith('{"setup"') and not text.endswith("\n"):
        lines.pop()
    rows = [json.loads(line) for line in lines]
    return _recorded(rows) if any("request" in row for row in rows) else _mooncake(rows)


def _mooncake(rows: list[dict[str, Any]]) -> Iterator[TraceRequest]:
    """Read Mooncake's rows. Their times are in steps of 3 s, which are spread with a fixed seed."""
    rng = random.Random(0)
    for row in rows:
        at_s = row["timestamp"] / 1e3 + rng.random() * MOONCAKE_STEP_S
        yield TraceRequest(
            at_s, int(row["input_length"]), int(row["output_length"]), tuple(map(int, row.get("hash_ids", ())))
        )


def _recorded(rows: list[dict[str, Any]]) -> Iterator[TraceRequest]:
    """Read the first sample of each finished request of a recorded run."""
    tokens = {row["end"]: row["tokens"] for row in rows if "end" in row}
    for row in rows:
        outputs = tokens.get(f"{row['request']}:0") if "request" in row else None
        if outputs:
            yield TraceRequest(row["arrival_s"], len(row["prompt_ids"]), outputs)


# --- arrivals from options -------------------------------------------------------------------------------------------
def make_arrivals(workload: WorkloadConfig, setup: Setup | None = None, classes: Sequence[Slo] = ()) -> list[Arrival]:
    """Return the arrivals sorted by time. `classes` replace the setup's. Raise `ConfigError` for an invalid trace."""
    traced = _trace(workload)
    mix = _mix(workload, setup, tuple(classes))
    if workload.trace_lengths and traced:
        return _with_trace_lengths(traced, workload.seed, mix, setup.machine.max_model_len if setup else None)
    return mix.requests([line.at_s for line in traced] if traced else _times(workload), workload.seed)


@dataclass(frozen=True, slots=True)
class OptionArrivals:
    """Function of a seed that calls `make_arrivals` at a rate; it can be pickled."""

    workload: WorkloadConfig
    setup: Setup | None
    rate: float | None
    classes: tuple[Slo, ...] = ()

    def __call__(self, seed: int) -> Sequence[Arrival]:
        changed = replace(self.workload, seed=self.workload.seed + seed)
        if self.rate is not None:
            changed = replace(changed, request_rate=self.rate)
        return make_arrivals(changed, self.setup, self.classes)


def _mix(workload: WorkloadConfig, setup: Setup | None, classes: tuple[Slo, ...]) -> RequestMix:
    """Return the setup's mix, or uniform lengths, with the options applied. Tenants are named 1, 2, ..."""
    w = workload
    if setup is not None:
        mix = setup.mix
    else:
        law = UniformLengths(w.input_len_min, w.input_len, w.output_len_min, w.output_len)
        mix = RequestMix(law, predictor_rmse=None, distinct=True)
    mix = replace(mix, classes=classes or mix.classes, predictor_rmse=w.predictor_rmse or mix.predictor_rmse)
    shares = w.class_share_list
    if shares and len(shares) != len(mix.classes):
        raise ConfigError(f"class_shares: got {len(shares)} shares for {len(mix.classes)} classes")
    if shares:
        mix = replace(mix, weights=shares)
    shares = w.tenant_share_list
    if shares:
        mix = replace(mix, tenants=tuple(str(i + 1) for i in range(len(shares))), tenant_weights=shares)
    return mix


def _trace(workload: WorkloadConfig) -> list[TraceRequest]:
    if workload.trace is None:
        return []
    lines = read_trace(workload.trace, seconds=workload.trace_seconds, speed=workload.trace_speed)
    return lines[: workload.num_requests]


def _times(workload: WorkloadConfig) -> list[float]:
    rate, count, seed = workload.request_rate, workload.num_requests, workload.seed
    if not rate:
        return [0.0] * count
    if workload.workload == "gamma":
        return gamma(rate, count, seed, workload.cv)
    if workload.workload == "bursts":
        return bursts(rate, count, seed)
    return poisson(rate, count, seed)


def _with_trace_lengths(
    traced: Sequence[TraceRequest], seed: int, mix: RequestMix, context: int | None
) -> list[Arrival]:
    """Return the trace's requests with its lengths, without those that exceed the context."""
    rng = random.Random(f"trace {seed}")
    arrivals = []
    for line in traced:
        if context is not None and line.prompt_len + line.output_len > context:
            continue
        arrivals.append(mix.promised(Arrival(line.at_s, line.prompt_ids(VOCAB_COUNT), line.output_len), rng))
    if not arrivals:
        raise ConfigError("trace: every request exceeds the context")
    return arrivals
