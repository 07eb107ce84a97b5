"""What one process of the server can tell a console: the owner of the engines of them, the others of their requests."""

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec
import orjson

from roseinfer.engine.api import EngineReport
from roseinfer.server.console.events import engines_json
from roseinfer.server.console.steps import Kept, NewSteps, steps_since
from roseinfer.server.observe.metric_registry import Numbers
from roseinfer.server.observe.record_json import record_json
from roseinfer.server.observe.records import RequestRecord, RequestRecords
from roseinfer.server.observe.routing import PLACED_AGAIN, PLACEMENTS, RESUMES, RETRIES

# In one event: a reader that has missed more gets the newest.
MAX_STEPS_TOLD = 600
MAX_REQUESTS_TOLD = 200
_ROUTED = (PLACEMENTS, RETRIES, PLACED_AGAIN, RESUMES)


class Since(msgspec.Struct, array_like=True):
    """What a reader has been told: of the first so many steps, and of the first so many requests that had ended in each
    process, by its `source`. `live`: whether it wants to know how those do that run.
    """

    steps: int = 0
    ended: dict[int, int] = {}
    live: bool = True


class Machine(msgspec.Struct, array_like=True):
    """From the owner of the engines."""

    engines: list[dict[str, Any]]
    steps: NewSteps


class Told(NamedTuple):
    """A request's record as JSON."""

    live: bool
    record: bytes


class News(msgspec.Struct, array_like=True):
    """`requests`: those that have ended, the newest first, then those that run. `ended`: how many there were, ever, in
    the process that is called `source`; `dropped`: those since the last time that are not among `requests`. `routed`:
    what was counted of requests between engines; None with one engine.
    """

    machine: Machine | None = None
    requests: list[Told] = []
    source: int = 0
    ended: int = 0
    dropped: int = 0
    routed: Numbers | None = None
    breakers: list[int] = []


def machine_news(since: Since, kept: Kept, reports: Iterable[EngineReport]) -> Machine:
    return Machine(engines_json(reports), steps_since(kept, since.steps, MAX_STEPS_TOLD))


def request_news(since: Since, source: int, records: RequestRecords, now_s: float) -> News:
    """From a process that answers requests. `now_s`: on the clock of their arrivals."""
    newest = records.newest(MAX_REQUESTS_TOLD, now_s, live=False)
    ever, before = newest[0].number if newest else 0, since.ended.get(source)
    told = list(takewhile(lambda record: record.number > (before or 0), newest))
    dropped = 0 if before is None else ever - before - len(told)
    if since.live and len(told) < MAX_REQUESTS_TOLD:
        told += records.newest(MAX_REQUESTS_TOLD - len(told), now_s, ended=False)
    return News(None, [_told(record) for record in told], source, ever, dropped)


def _told(record: RequestRecord) -> Told:
    return Told(record.live, orjson.dumps(record_json(record)))


def routed_news(numbers: Numbers) -> Numbers | None:
    """Of what a process has counted, the router's part."""
    return {name: numbers[name] for name in _ROUTED} if PLACEMENTS in numbers else None


def router_json(routed: Numbers, breakers: Iterable[int]) -> dict[str, Any]:
    """Of all processes together: what became of requests between engines, since the server's start."""
    return {
        "placements": _by_label(routed[PLACEMENTS], 1),
        "reasons": _by_label(routed[PLACEMENTS], 2),
        "retries": sum(_by_label(routed[RETRIES], 1).values()),
        "placed_again": _by_label(routed[PLACED_AGAIN], 2),
        "resumes": _by_label(routed[RESUMES], 2),
        "breakers": sorted(set(breakers)),
    }


def _by_label(series: Mapping[tuple[str, ...], list[float]], place: int) -> dict[str, int]:
    """Sums by the label that stands there: 0 is the model's, 1 the engine's."""
    sums: dict[str, int] = {}
    for labels, numbers in sorted(series.items()):
        sums[labels[place]] = sums.get(labels[place], 0) + int(numbers[0])
    return sums
