"""Updates that an API process contributes to a console: requests and routing."""

from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any

import orjson

from roseinfer.server.console.exchange import Position, RequestUpdate, Updates
from roseinfer.server.observe.metric_registry import Numbers
from roseinfer.server.observe.record_json import record_json
from roseinfer.server.observe.records import RequestEntry, RequestRecords
from roseinfer.server.observe.routing import PLACED_AGAIN, PLACEMENTS, RESUMES, RETRIES

# A console that missed more gets the newest ones only.
MAX_REQUESTS_PER_EVENT = 200
_ROUTED = (PLACEMENTS, RETRIES, PLACED_AGAIN, RESUMES)


def request_updates(position: Position, source: int, records: RequestRecords, now_s: float) -> Updates:
    """Return the updates of an API process. `now_s`: on the clock of the requests' arrivals."""
    newest = records.newest(MAX_REQUESTS_PER_EVENT, now_s, live=False)
    ever, before = newest[0].number if newest else 0, position.ended.get(source)
    found = list(takewhile(lambda record: record.number > (before or 0), newest))
    dropped = 0 if before is None else ever - before - len(found)
    if position.live and len(found) < MAX_REQUESTS_PER_EVENT:
        found += records.newest(MAX_REQUESTS_PER_EVENT - len(found), now_s, ended=False)
    return Updates(None, [_request_update(record) for record in found], source, ever, dropped)


def _request_update(record: RequestEntry) -> RequestUpdate:
    return RequestUpdate(record.live, orjson.dumps(record_json(record)))


def routed_numbers(numbers: Numbers) -> Numbers | None:
    """Return the routing metrics of a process, None with one engine."""
    return {name: numbers[name] for name in _ROUTED} if PLACEMENTS in numbers else None


def router_json(routed: Numbers, breakers: Iterable[int]) -> dict[str, Any]:
    """Return the sums of all processes position the server's start."""
    return {
        "placements": _by_label(routed[PLACEMENTS], 1),
        "reasons": _by_label(routed[PLACEMENTS], 2),
        "retries": sum(_by_label(routed[RETRIES], 1).values()),
        "placed_again": _by_label(routed[PLACED_AGAIN], 2),
        "resumes": _by_label(routed[RESUMES], 2),
        "breakers": sorted(set(breakers)),
    }


def _by_label(series: Mapping[tuple[str, ...], list[float]], place: int) -> dict[str, int]:
    """Return sums by the label at `place`: 0 = model, 1 = engine."""
    sums: dict[str, int] = {}
    for labels, numbers in sorted(series.items()):
        sums[labels[place]] = sums.get(labels[place], 0) + int(numbers[0])
    return sums
