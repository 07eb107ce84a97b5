"""Replay of a router's recorded calls, to check that it sends every request to the same engine for the same reason."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.promise import Promise
from roseinfer.core.recorder import read_lines
from roseinfer.core.step_cost import StepCost
from roseinfer.router.base import Placement, RoutingRequest
from roseinfer.router.breaker import AttemptOutcome
from roseinfer.router.placer import Placer

COST_FIELD, EXPERT_FIELD = 3, 20  # indices
Where = tuple[int, str] | None  # engine and reason; None: nobody took it


@dataclass(slots=True)
class RouterReplay:
    """`recorded` and `replayed`: of every request in order. `promises`: what each engine published, as far as the
    router has seen it.
    """

    recorded: list[Where] = field(default_factory=list)
    replayed: list[Where] = field(default_factory=list)
    promises: dict[int, list[Promise]] = field(default_factory=dict)

    @property
    def same(self) -> int:
        """Number of leading requests that were placed as recorded."""
        pairs = zip(self.recorded, self.replayed, strict=True)
        return next((number for number, (was, now) in enumerate(pairs) if was != now), len(self.recorded))


def replay_placements(path: str | Path) -> RouterReplay:
    """Replay a file of `RecordingPlacer`. Raise `ConfigError` for any other file."""
    try:
        lines = read_lines(path)
        placer = Placer(**next(lines, {})["setup"])
        replay = _Replay(placer)
        for line in lines:
            replay.take(line)
    except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} is not a router's record: {error!r}") from error
    return replay.found


class _Replay:
    def __init__(self, placer: Placer) -> None:
        self.found = RouterReplay()
        self._placer = placer
        self._placements: dict[int, Placement] = {}

    def take(self, line: dict[str, Any]) -> None:
        placer = self._placer
        if "update" in line:
            promise = _promise(line["promise"])
            self.found.promises.setdefault(line["update"], []).append(promise)
            placer.update(line["update"], promise)
        elif "up" in line:
            placer.set_available(line["up"], line["is"])
        elif "forget" in line:
            placer.reset(line["forget"])
        elif "add" in line:
            placer.add(line["add"])
        elif "drop" in line:
            placer.remove(line["drop"])
        elif "report" in line:
            placer.report(line["report"], AttemptOutcome(line["outcome"]), line["at_s"])
        elif "started" in line:
            if line["started"] in self._placements:  # else the replay has parted from the run
                placer.on_first_token(self._placements[line["started"]], line["cached_tokens"])
        elif "unstarted" in line:
            if line["unstarted"] in self._placements:
                placer.on_unprefilled(self._placements[line["unstarted"]])
        else:
            self._place("place" if "place" in line else "keeper", line)

    def _place(self, how: str, line: dict[str, Any]) -> None:
        place = self._placer.place if how == "place" else self._placer.place_retry
        again = place(RoutingRequest(*line["ask"]), line["at_s"], line["but"])
        was = line[how]
        self.found.recorded.append(None if was is None else (was[0], was[1]))
        self.found.replayed.append(None if again is None else (again.engine, again.reason))
        if again is not None:
            self._placements[again.number] = again


def _promise(values: list[Any]) -> Promise:
    """Build a promise from JSON, which has no tuples. Older files lack newer fields."""
    found = [tuple(value) if isinstance(value, list) else value for value in values]
    costs = found[COST_FIELD]
    # The cost of an expert used to be a field of the promise.
    expert_s = [found.pop(EXPERT_FIELD)] if len(costs) < len(StepCost._fields) and len(found) > EXPERT_FIELD else []
    found[COST_FIELD] = StepCost(*costs, *expert_s)
    return Promise._make([*found, *Promise(0.0)[len(found) :]])
