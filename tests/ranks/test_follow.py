"""Calls that a rank makes for rank 0."""

import os
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from roseinfer.core.errors import EngineDeadError
from roseinfer.core.plan import RowResult, StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import Runner
from roseinfer.ranks.calls import CLOSE, COLLECT, SAMPLE, CallWriter, SampledDigest
from roseinfer.ranks.process import follow
from roseinfer.ranks.ring import RingReader, RingWriter

SIZE = 1 << 16


class RecordingRunner:
    """A runner that records its calls; step n samples token n."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._space = memoryview(array("I", bytes(16)))

    def submit(self, plan: StepPlan) -> int:
        self.calls.append(("submit", plan.step))
        return plan.step

    def mask_space(self, lines: int) -> memoryview:
        return self._space[: 2 * lines]

    def sample(self, handle: int, masks: TokenMasks | None = None) -> None:
        self.calls.append(("sample", handle, masks and (masks.rows, list(masks.words), masks.drafts_before)))

    def collect(self, handle: int) -> StepResult:
        self.calls.append(("collect", handle))
        return StepResult(handle, [RowResult("a", (handle,))])

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(1, lambda: None, SIZE)
    with RingReader(os.dup(writer.memory), os.dup(writer.wake_pipes[0]), 0, 1, SIZE, 0.0) as reader:
        yield writer, reader
    writer.close()


def send_steps(writer: RingWriter, *steps: int, collected: SampledDigest) -> None:
    """Send calls of steps. Odd steps are sampled under a mask."""
    calls = CallWriter()
    for step in steps:
        writer.write(calls.submit(StepPlan(step, []), collected))
        masks = TokenMasks((3,), memoryview(array("I", [step, 7])), (step,))
        writer.write(calls.masked(masks) if step % 2 else SAMPLE)


def test_calls_are_made_in_order(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    sampled, runner, done = SampledDigest(), RecordingRunner(), []
    send_steps(writer, 0, 1, collected=sampled)
    writer.write(COLLECT)
    sampled.add([RowResult("a", (0,))])
    send_steps(writer, 2, collected=sampled)
    for _ in range(2):
        writer.write(COLLECT)
    writer.write(CLOSE)
    as_runner: Runner = runner  # type: ignore[assignment]
    follow(reader, as_runner, lambda: done.append(1))
    assert runner.calls == [
        *[("submit", 0), ("sample", 0, None), ("submit", 1), ("sample", 1, ((3,), [1, 7], (1,))), ("collect", 0)],
        *[("submit", 2), ("sample", 2, None), ("collect", 1), ("collect", 2), "close"],
    ]
    assert len(done) == 3


def test_a_rank_fails_if_it_has_sampled_other_tokens_than_rank_0(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    sampled = SampledDigest()
    send_steps(writer, 0, collected=sampled)
    writer.write(COLLECT)
    sampled.add([RowResult("a", (5,))])
    send_steps(writer, 1, collected=sampled)
    runner: Runner = RecordingRunner()  # type: ignore[assignment]
    with pytest.raises(EngineDeadError, match="the ranks have sampled different tokens"):
        follow(reader, runner, lambda: None)
