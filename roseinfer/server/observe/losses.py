"""Where a request's time went: what it waited for before it had a seat, and what it lost behind that."""

from typing import NamedTuple

from roseinfer.core.slo import Cause
from roseinfer.server.observe.records import RequestRecord

# Names of losses beside those of causes.
PREEMPTED, SAT_OUT = "preempted", "sat_out"


class Losses(NamedTuple):
    """Where a request's time went, in seconds. `waits`: before it had a seat, by cause; `preempted`: without one,
    later; `prefill` and `decode` with a seat, the share `idle` of it in steps that left it out.
    """

    waits: dict[str, float]
    preempted: float
    prefill: float
    decode: float
    idle: float

    def before_first(self) -> dict[str, float]:
        """By what they would be named as."""
        return {**self.waits, SAT_OUT: self.idle * self.prefill}

    def behind_first(self) -> dict[str, float]:
        return {PREEMPTED: self.preempted, SAT_OUT: self.idle * self.decode}

    def all(self) -> dict[str, float]:
        return {**self.waits, PREEMPTED: self.preempted, SAT_OUT: self.idle * (self.prefill + self.decode)}


def waits_before_seat(record: RequestRecord) -> tuple[float, list[tuple[Cause | None, float]]]:
    """When it first got a seat, in seconds from its arrival (until now if it has not), and what it waited for until
    then, None = nobody says. In the order in which it is known to be: on another engine, on its way, for the step that
    ran, then the others with the longest first, last room that it had lost again.

    The engine names all waits that it knows of; beside them a request was on its way there, or its end on the way back.
    """
    told = record.told
    known = _known(record)
    named = dict(known or ())
    named_s = sum(named.values())
    seat_s = _seat_s(record, None if known is None else named_s)
    unnamed_s = seat_s - named_s
    if known is None or told.scheduled_s is None:
        waits = _cut(record, named, seat_s)
        return seat_s, [*waits, (None, unnamed_s)] if unnamed_s > 0 else waits
    if unnamed_s > _BRIEF_S:
        named[Cause.TRANSIT] = named.get(Cause.TRANSIT, 0.0) + unnamed_s
    else:
        seat_s = min(seat_s, named_s)
    return seat_s, _cut(record, named, seat_s)


_BRIEF_S = 0.001  # what is not worth telling: from the plan that seats a request to the step itself
_EARLY = {Cause.ENGINE: 0, Cause.TRANSIT: 1, Cause.STEP: 2}


def _seat_s(record: RequestRecord, named_s: float | None) -> float:
    """Before a request has ended its engine has said what it waited for, and not until when. `named_s`: all that, if it
    is known.
    """
    told = record.told
    until_s = record.age_s if told.first_s is None else told.first_s
    if told.scheduled_s is not None:
        return min(told.scheduled_s, until_s)
    return until_s if told.first_s is None or named_s is None else min(named_s, until_s)


def _known(record: RequestRecord) -> tuple[tuple[Cause, float], ...] | None:
    """What it waited for from its arrival on; None if nobody says. An engine that only went on with it
    tells of its own time with it.
    """
    why, way = record.told.why, record.way
    if why is None or (way is not None and way.resumes > 0 and any(cause is Cause.ENGINE for cause, _ in why.waited)):
        return None
    return why.waited


def _cut(record: RequestRecord, named: dict[Cause, float], until_s: float) -> list[tuple[Cause | None, float]]:
    """Those that fit until then, in their order."""
    again = record.told.preemptions > 0
    ranks = {cause: _EARLY.get(cause, 4 if cause is Cause.BLOCKS and again else 3) for cause in named}
    kept: list[tuple[Cause | None, float]] = []
    left_s = until_s
    for cause in sorted(named, key=lambda each: ranks[each]):
        if left_s > 0:
            kept.append((cause, min(named[cause], left_s)))
            left_s -= named[cause]
    return kept


def losses(record: RequestRecord) -> Losses:
    told = record.told
    seat_s, told_waits = waits_before_seat(record)
    waits: dict[str, float] = {}
    for cause, seconds in told_waits:
        waits[cause or Cause.OTHER] = waits.get(cause or Cause.OTHER, 0.0) + seconds
    first_s = told.first_s if told.first_s is not None else record.age_s
    last_s = told.last_s if told.last_s is not None else first_s
    why, decode_s = told.why, last_s - first_s
    preempted = decode_s if told.preemptions else 0.0  # nobody says how long
    idle = 0.0
    if why is not None:
        waited = sum(seconds for cause, seconds in why.waited if cause is not Cause.ENGINE)
        if _known(record) is not None:
            waited = sum(seconds for _, seconds in why.waited) - sum(waits.values())
        preempted = max(0.0, waited) if told.preemptions else 0.0
        idle = why.sat_out / why.steps if why.steps else 0.0
    return Losses(waits, min(preempted, decode_s), max(0.0, first_s - seat_s), max(0.0, decode_s - preempted), idle)
