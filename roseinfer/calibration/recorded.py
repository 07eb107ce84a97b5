"""Steps of a recorded run as samples for the cost model."""

from roseinfer.core.plan import Row, StepResult
from roseinfer.core.runner import ContextReads, ExpertChoice
from roseinfer.sched.cost.offline_fit import CostSample
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.offload import rows_seconds
from roseinfer.sim.replay import Rows, Turn, read_recording


def recorded_samples(path: str) -> tuple[list[CostSample], ExpertChoice | None, ContextReads]:
    """Return the samples, and experts and reads of the model. Raise `ConfigError` if the file is not a recorded run.

    With two steps in flight a turn collects the step of an earlier one; steps end in the order of their plans.
    Copies and snapshots of recurrent states are not recorded, so they count as part of the rows' time.
    """
    recording = read_recording(path)
    shape = CostParams(reads=recording.setup.reads)
    plans = [turn.rows for turn in recording.turns if turn.rows or any(turn.copies)]
    ends = [turn for turn in recording.turns if turn.duration_s is not None]
    # The last plans of a run that was cut off have no ends.
    steps = [(rows, _rows_seconds(end)) for rows, end in zip(plans, ends, strict=False) if rows]
    samples = [CostSample(shape.work(_as_rows(rows)), seconds) for rows, seconds in steps if seconds]
    return samples, recording.setup.experts, shape.reads


def _rows_seconds(end: Turn) -> float:
    took_s = end.duration_s or 0.0
    return rows_seconds(StepResult(0, [], took_s, *end.copies_s), took_s)


def _as_rows(rows: Rows) -> list[Row]:
    return [Row(name, 0, start, count, 0, False, 0, 0, ()) for name, start, count in rows]
