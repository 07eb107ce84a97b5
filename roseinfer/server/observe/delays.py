"""Split of a request's time: waits before its first seat, and what delayed it before and after its first token."""

from typing import NamedTuple

from roseinfer.core.slo import Cause, Why
from roseinfer.server.observe.records import RequestEntry

# Names of delays that have no `Cause`.
PREEMPTED, SAT_OUT = "preempted", "sat_out"
_NOTHING = Why()


class PhaseTimes(NamedTuple):
    """Split of the time before the first token, or after it, in seconds.

    `waits`: before the first seat, by cause; `preempted`: without a seat later; `sat_out`: with a seat, in steps that
    computed nothing for the request; `ran`: the rest. `steps`: steps while it had a seat; `missed`: those without it.
    """

    waits: dict[str, float]
    preempted: float
    sat_out: float
    ran: float
    steps: int
    missed: int

    def delays(self) -> dict[str, float]:
        """Return the delays by name."""
        return {**self.waits, PREEMPTED: self.preempted, SAT_OUT: self.sat_out}

    def plus(self, later: "PhaseTimes") -> "PhaseTimes":
        """Return the times of both phases together; `later` has no waits."""
        return PhaseTimes(
            self.waits,
            self.preempted + later.preempted,
            self.sat_out + later.sat_out,
            self.ran + later.ran,
            self.steps + later.steps,
            self.missed + later.missed,
        )


def waits_before_seat(record: RequestEntry) -> tuple[float, list[tuple[Cause | None, float]]]:
    """Return seconds from arrival to the first seat (or to now), and the waits until then; cause None = unknown.

    Waits are in their known order: another engine, transit, the running step, other causes with the longest first,
    blocks after a preemption. Time that the engine does not name was transit.
    """
    sample = record.worst
    known = sample.first_why
    named = {} if known is None else dict(known.waited)
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


def before_first(record: RequestEntry) -> PhaseTimes:
    """Return the times up to the first token, or up to now."""
    sample = record.worst
    seat_s, seat_waits = waits_before_seat(record)
    waits: dict[str, float] = {}
    for cause, seconds in seat_waits:
        waits[cause or Cause.OTHER] = waits.get(cause or Cause.OTHER, 0.0) + seconds
    why = sample.first_why or _NOTHING
    had_seat_s = max(0.0, (record.age_s if sample.first_s is None else sample.first_s) - seat_s)
    preempted_s = _waited_s(why) - sum(waits.values()) if sample.preemptions else 0.0
    preempted_s = min(max(0.0, preempted_s), had_seat_s)
    had_seat_s -= preempted_s
    sat_out_s = max(0.0, had_seat_s - why.prefill_s) if why.sat_out else 0.0
    return PhaseTimes(waits, preempted_s, sat_out_s, had_seat_s - sat_out_s, why.steps, why.sat_out)


def after_first(record: RequestEntry) -> PhaseTimes:
    """Return the times after the first token; all zero before it."""
    sample = record.worst
    if sample.first_s is None or sample.last_s is None:
        return PhaseTimes({}, 0.0, 0.0, 0.0, 0, 0)
    had_seat_s = max(0.0, sample.last_s - sample.first_s)
    why, first = sample.why or _NOTHING, sample.first_why or _NOTHING
    if _elsewhere_s(why) > _elsewhere_s(first):  # resumed after its first token: `why` is of the last engine only
        first = Why(((Cause.ENGINE, _elsewhere_s(why)),))
    waited_s = _waited_s(why) - _waited_s(first)
    preempted_s = 0.0
    if sample.preemptions:
        preempted_s = had_seat_s if sample.why is None else min(max(0.0, waited_s), had_seat_s)  # None: an upper bound
    had_seat_s -= preempted_s
    steps, missed = max(0, why.steps - first.steps), max(0, why.sat_out - first.sat_out)
    # Without these steps, its tokens would have taken fewer steps of the same mean length.
    sat_out_s = had_seat_s * missed / steps if steps else 0.0
    return PhaseTimes({}, preempted_s, sat_out_s, had_seat_s - sat_out_s, steps, missed)


def _waited_s(why: Why) -> float:
    return sum(seconds for _, seconds in why.waited)


def _elsewhere_s(why: Why) -> float:
    return sum(seconds for cause, seconds in why.waited if cause is Cause.ENGINE)
