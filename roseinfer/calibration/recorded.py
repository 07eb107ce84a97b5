"""The steps of a recorded run as samples for the cost model."""

from roseinfer.core.plan import Row, StepResult
from roseinfer.sched.cost import work_of
from roseinfer.sched.fit import Sample
from roseinfer.sched.offload import lasted
from roseinfer.sim.replay import Rows, read_recording


def recorded_samples(path: str) -> list[Sample]:
    """Raises `ConfigError` if the file is no recorded run.

    With two steps in flight a turn collects the step of an earlier one; steps end in the order of their plans.
    """
    recording = read_recording(path)
    plans = [turn.rows for turn in recording.turns if turn.rows or any(turn.copies)]
    ends = [turn for turn in recording.turns if turn.duration_s is not None]
    # The last plans of a run that was cut off have no ends.
    return [
        Sample(work_of(_as_rows(rows)), end.duration_s)
        for rows, end in zip(plans, ends, strict=False)
        if rows and end.duration_s is not None and not lasted(StepResult(0, [], end.duration_s, *end.copies_s))
    ]


def _as_rows(rows: Rows) -> list[Row]:
    return [Row(name, 0, start, count, 0, False, 0, 0, ()) for name, start, count in rows]
