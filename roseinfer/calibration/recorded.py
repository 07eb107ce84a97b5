"""The steps of a recorded run as samples for the cost model."""

from roseinfer.core.plan import Row
from roseinfer.sched.cost import work_of
from roseinfer.sched.fit import Sample
from roseinfer.sim.replay import Rows, read_recording


def recorded_samples(path: str) -> list[Sample]:
    """Raises `ConfigError` if the file is no recorded run.

    With two steps in flight a turn collects the step of an earlier one; steps end in the order of their plans.
    """
    recording = read_recording(path)
    plans = [turn.rows for turn in recording.turns if turn.rows]
    durations = [turn.duration_s for turn in recording.turns if turn.duration_s is not None]
    # The last plans of a run that was cut off have no durations.
    return [Sample(work_of(_as_rows(rows)), seconds) for rows, seconds in zip(plans, durations, strict=False)]


def _as_rows(rows: Rows) -> list[Row]:
    return [Row(name, 0, start, count, 0, False, 0, 0, ()) for name, start, count in rows]
