"""When there should be more engines, or fewer: by how full those that run are, and by what was turned away."""

from dataclasses import dataclass
from math import ceil, floor

from roseinfer.core.promise import Promise

ENOUGH = 20  # requests in the window, below which a share of refusals says nothing
LEAST_ROOM = 0.13  # of a second, which an engine is taken to have for work at any pace


@dataclass(frozen=True, slots=True)
class SizeRule:
    """How many engines there should be, between `least` and `most`.

    Over the last `window_s` seconds: more if refusals that an idle engine would have kept exceed `refused` of the
    requests with objectives, or their mean `fullness` exceeds `high`: as many as bring it to `aim`. One fewer if that
    of the others would stay below `low` for `patience_s` seconds.
    """

    least: int
    most: int
    window_s: float = 60.0
    refused: float = 0.01
    high: float = 0.85
    aim: float = 0.75
    low: float = 0.65
    patience_s: float = 600.0


def fullness(promise: Promise) -> float:
    """What an engine is asked for, of what it can do at the pace that its tightest request needs; 1 = full.

    The constant cost of steps is not part of either: it is the same for one request as for a hundred, so a fleet twice
    as large pays it twice.
    """
    pace = promise.constant_s / promise.smallest_s
    return (promise.busy + promise.weights + promise.arriving) / max(LEAST_ROOM, promise.keep - pace)


def refusing(rule: SizeRule, promised: float, refused: float) -> bool:
    """Whether too many were turned away: of `promised` requests with objectives, `refused`, in the window."""
    return promised >= ENOUGH and refused > rule.refused * promised


@dataclass(frozen=True, slots=True)
class Seen:
    """A fleet at `at_s` seconds: `running` engines, mean `used` of them over the window, more that are `coming`;
    whether it is `refusing`.
    """

    at_s: float
    running: int
    coming: int
    used: float
    refusing: bool


def fleet_size(rule: SizeRule, seen: Seen, calm_s: float | None) -> tuple[int, float | None]:
    """How many engines there should be, those that are coming included, and since when fewer would do (None: they
    would not). `calm_s`: the latter, as the call before returned it.
    """
    size = seen.running + seen.coming
    if seen.used > rule.high or seen.refusing:
        more = ceil(seen.running * seen.used / rule.aim)
        if seen.refusing and not seen.coming:
            more = max(more, size + 1)
        return min(rule.most, max(size, more)), None
    if seen.coming or size <= rule.least or seen.used * seen.running >= rule.low * (seen.running - 1):
        return size, None
    calm_s = seen.at_s if calm_s is None else calm_s
    return (size - 1 if floor(seen.at_s - calm_s) >= rule.patience_s else size), calm_s
