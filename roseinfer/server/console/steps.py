"""Newest steps of all engines for the console."""

import time
from itertools import islice
from typing import NamedTuple

from roseinfer.engine.api import StepRecord
from roseinfer.server.observe.milliseconds import ms
from roseinfer.server.observe.step_metrics import StepMetrics

# Kept by the owner of the engines.
MAX_STEPS = 4096

# Engine, end in Unix seconds, duration and budget in ms, rows, prompt tokens, tokens, predicted duration in ms.
ShownStep = tuple[int, float, float | None, float | None, int, int, int, float | None]


class NewSteps(NamedTuple):
    """New steps. `ever`: all steps so far, the next position."""

    ever: int
    steps: list[ShownStep]


def steps_since(history: StepMetrics, count: int, most: int) -> NewSteps:
    """Return the newest `most` steps after the first `count`, oldest first."""
    shown = min(max(0, history.count - count), most, len(history.newest))
    to_unix_s = time.time() - time.monotonic()
    steps = [_shown(*step, to_unix_s) for step in islice(history.newest, len(history.newest) - shown, None)]
    return NewSteps(history.count, steps)


def _shown(engine: int, record: StepRecord, to_unix_s: float) -> ShownStep:
    return (
        engine,
        round(record.ended_s + to_unix_s, 4),
        ms(record.duration_s),
        ms(record.budget_s),
        record.rows,
        record.prompt_tokens,
        record.tokens,
        ms(record.predicted_s) if record.predicted_s > 0 else None,
    )
