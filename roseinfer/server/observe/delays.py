"""Split of a request's time into waits before its first seat, and time lost after it."""

from typing import NamedTuple

from roseinfer.core.slo import Cause
from roseinfer.server.observe.records import RequestEntry

# Names of delays that have no `Cause`.
PREEMPTED, SAT_OUT = "preempted", "sat_out"


class DelayBreakdown(NamedTuple):
    """Split of a request's time, in seconds.

    `waits`: before its first seat, by cause; `preempted`: without a seat later; `prefill`, `decode`: with a seat.
    `idle`: share of the time with a seat in steps that computed nothing for the request.
    """

    waits: dict[str, float]
    preempted: float
    prefill: float
    decode: float
    idle: float

    def before_first(self) -> dict[str, float]:
        """Return delays up to the first token by name."""
        return {**self.waits, SAT_OUT: self.idle * self.prefill}

    def after_first(self) -> dict[str, float]:
        return {PREEMPTED: self.preempted, SAT_OUT: self.idle * self.decode}

    def all(self) -> dict[str, float]:
        return {**self.waits, PREEMPTED: self.preempted, SAT_OUT: self.idle * (self.prefill + self.decode)}


def waits_before_seat(record: RequestEntry) -> tuple[float, list[tuple[Cause | None, float]]]:
    """Return seconds from arrival to the first seat (or to now), and the waits until then; cause None = unknown.

    Waits are in their known order: another engine, transit, the running step, other causes with the longest first,
    blocks after a preemption. Time that the engine does not name was transit.
    """
    sample = record.worst
    known = _known(record)
    named = dict(known or ())
    named_s = sum(named.values())
    seat_s = _seat_s(record, None if known is None else named_s)
    unnamed_s = seat_s - named_s
    if known is None or sample.scheduled_s is None:
        waits = _cut(record, named, seat_s)
        return seat_s, [*waits, (None, unnamed_s)] if unnamed_s > 0 else waits
    if unnamed_s > _BRIEF_S:
        named[Cause.TRANSIT] = named.get(Cause.TRANSIT, 0.0) + unnamed_s
    else:
        seat_s = min(seat_s, named_s)
    return seat_s, _cut(record, named, seat_s)


_BRIEF_S = 0.001  # from the plan that seats a request to its step
_EARLY = {Cause.ENGINE: 0, Cause.TRANSIT: 1, Cause.STEP: 2}


def _seat_s(record: RequestEntry, named_s: float | None) -> float:
    """Return seconds from arrival to the first seat. `named_s`: sum of the known waits.

    A running request's engine reports its waits, but not when they ended.
    """
    sample = record.worst
    until_s = record.age_s if sample.first_s is None else sample.first_s
    if sample.scheduled_s is not None:
        return min(sample.scheduled_s, until_s)
    return until_s if sample.first_s is None or named_s is None else min(named_s, until_s)


def _known(record: RequestEntry) -> tuple[tuple[Cause, float], ...] | None:
    """Return the waits since arrival; None if unknown. After a resume the engine knows its own part only."""
    why, route = record.worst.why, record.route
    if why is None or (
        route is not None and route.resumes > 0 and any(cause is Cause.ENGINE for cause, _ in why.waited)
    ):
        return None
    return why.waited


def _cut(record: RequestEntry, named: dict[Cause, float], until_s: float) -> list[tuple[Cause | None, float]]:
    """Return the waits in their order, cut at `until_s`."""
    again = record.worst.preemptions > 0
    ranks = {cause: _EARLY.get(cause, 4 if cause is Cause.BLOCKS and again else 3) for cause in named}
    kept: list[tuple[Cause | None, float]] = []
    left_s = until_s
    for cause in sorted(named, key=lambda each: ranks[each]):
        if left_s > 0:
            kept.append((cause, min(named[cause], left_s)))
            left_s -= named[cause]
    return kept


def delay_breakdown(record: RequestEntry) -> DelayBreakdown:
    sample = record.worst
    seat_s, seat_waits = waits_before_seat(record)
    waits: dict[str, float] = {}
    for cause, seconds in seat_waits:
        waits[cause or Cause.OTHER] = waits.get(cause or Cause.OTHER, 0.0) + seconds
    first_s = sample.first_s if sample.first_s is not None else record.age_s
    last_s = sample.last_s if sample.last_s is not None else first_s
    why, decode_s = sample.why, last_s - first_s
    preempted = decode_s if sample.preemptions else 0.0  # an upper bound: the engine does not report it
    idle = 0.0
    if why is not None:
        waited = sum(seconds for cause, seconds in why.waited if cause is not Cause.ENGINE)
        if _known(record) is not None:
            waited = sum(seconds for _, seconds in why.waited) - sum(waits.values())
        preempted = max(0.0, waited) if sample.preemptions else 0.0
        idle = why.sat_out / why.steps if why.steps else 0.0
    return DelayBreakdown(
        waits, min(preempted, decode_s), max(0.0, first_s - seat_s), max(0.0, decode_s - preempted), idle
    )
