"""The newest steps of all engines, as the console is shown them."""

import time
from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from roseinfer.engine.api import StepRecord

# As many are kept by whoever owns the engines.
MAX_STEPS = 4096

# Engine, end in Unix seconds, duration and budget in ms, rows, prompt tokens, tokens, predicted duration in ms.
ShownStep = tuple[int, float, float, float | None, int, int, int, float | None]


class NewSteps(NamedTuple):
    """`ever`: how many there were, to ask on from."""

    ever: int
    steps: list[ShownStep]


class Kept(Protocol):
    """Steps that somebody keeps: how many there were, ever, and the newest with their engines."""

    count: int
    newest: deque[tuple[int, StepRecord]]


def steps_since(kept: Kept, count: int, most: int) -> NewSteps:
    """Those after the first `count` there ever were, the newest `most` of them, oldest first."""
    shown = min(max(0, kept.count - count), most, len(kept.newest))
    to_unix_s = time.time() - time.monotonic()
    steps = [_shown(*step, to_unix_s) for step in islice(kept.newest, len(kept.newest) - shown, None)]
    return NewSteps(kept.count, steps)


def _shown(engine: int, record: StepRecord, to_unix_s: float) -> ShownStep:
    return (
        engine,
        round(record.ended_s + to_unix_s, 4),
        _ms(record.duration_s),
        None if record.budget_s is None else _ms(record.budget_s),
        record.rows,
        record.prompt_tokens,
        record.tokens,
        _ms(record.predicted_s) if record.predicted_s > 0 else None,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
