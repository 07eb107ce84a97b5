"""Reader of several processes, one of which owns the engines."""

import asyncio
from typing import Any

import orjson
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.promise import Promise
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState, StepRecord
from roseinfer.server.console import reader as reader_module
from roseinfer.server.console import updates
from roseinfer.server.console.engines import answer_engine_queries, engines_json
from roseinfer.server.console.exchange import EngineUpdates, Position, RequestUpdate, Updates, answer_queries
from roseinfer.server.console.reader import LIVE_INTERVAL_COUNT, ConsoleReader
from roseinfer.server.console.steps import NewSteps
from roseinfer.server.observe.metric_registry import MetricRegistry
from roseinfer.server.observe.model_names import ModelNames
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.records import RequestEntry, SampleSummary
from roseinfer.server.observe.routing import RoutingMetrics
from roseinfer.server.observe.step_metrics import StepMetrics
from roseinfer.server.request.service import Service
from tests.helpers.engine_info import engine_info


class Together(PeerQueries):
    """Transport that calls the given processes with the bytes that a connection would carry."""

    def __init__(self, *others: PeerQueries) -> None:
        super().__init__()
        self.others = list(others)
        self.asked = 0

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        self.asked += 1
        answers = [other.answer(topic, body) for other in self.others]
        return [answer for answer in answers if answer is not None]


def knowing(known: Updates) -> PeerQueries:
    peer_queries = PeerQueries()
    answer_queries(peer_queries, lambda since: known)
    return peer_queries


def told(name: str, live: bool = False) -> RequestUpdate:
    return RequestUpdate(live, orjson.dumps({"id": name}))


def look(own: Any, peer_queries: PeerQueries) -> ConsoleReader:
    return ConsoleReader(Any, own, peer_queries)  # type: ignore[arg-type]


def tick(reader: ConsoleReader) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(asyncio.run(reader.tick())))  # type: ignore[no-any-return]


class Supervisor:
    def reports(self) -> list[EngineReport]:
        stats = SchedulerStats(running=1)
        return [EngineReport(i, EngineState.READY, EngineHealth(True, 0.1), stats) for i in range(2)]

    def on_step(self, listener: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("promise", "found"),
    [
        (None, (None, None)),
        (Promise(0.0, steps=100), (None, None)),  # its policy fits no costs
        (Promise(0.0, steps=3, cost=StepCost(0.004, 0.001)), (None, None)),  # nothing is measured yet
        (Promise(0.0, steps=100, cost=StepCost(0.004, 0.001, 0.0005)), (4.5, 1.0)),
    ],
)
def test_the_speed_of_an_engine_is_shown_once_measured(promise: Promise | None, found: tuple[Any, Any]) -> None:
    report = EngineReport(0, EngineState.READY, EngineHealth(True, 0.1), SchedulerStats(), promise=promise)
    (shown,) = engines_json([report], ModelNames("m"))
    assert (shown["step_ms"], shown["prompt_token_ms"]) == found
    assert shown["slowdown"] is None, "not calibrated"


def test_an_engine_is_compared_with_its_calibration() -> None:
    info = engine_info(calibrated=StepCost(0.002, 0.001, 0.0005, expert_s=0.0001))
    promise = Promise(0.0, steps=100, cost=StepCost(0.008, 0.001, 0.001, expert_s=0.0002), experts=5.0)
    report = EngineReport(0, EngineState.READY, EngineHealth(True, 0.1), SchedulerStats(), info=info, promise=promise)
    (shown,) = engines_json([report], ModelNames("m"))
    assert shown["slowdown"] == pytest.approx(10 / 3, abs=1e-3)


def test_engines_and_steps_come_from_their_owner_alone() -> None:
    steps, manager = StepMetrics(MetricRegistry(), ModelNames("m"), keep=10), PeerQueries()
    answer_engine_queries(manager, steps, Supervisor().reports, ModelNames("m"))
    reader = look(lambda since: Updates(), Together(knowing(Updates()), manager))
    steps.step(1, StepRecord(5, 0.01, budget_s=0.02))
    first = tick(reader)
    assert [engine["engine"] for engine in first["engines"]] == [0, 1]
    assert [(step[0], step[3], step[6]) for step in first["steps"]] == [(1, 20.0, 5)]
    assert tick(reader)["steps"] == []
    steps.step(0, StepRecord(6, 0.01))
    assert [step[6] for step in tick(reader)["steps"]] == [6]


def test_an_owner_that_does_not_answer_has_said_something_before() -> None:
    machine = EngineUpdates([{"engine": 0}], NewSteps(7, []))
    peer_queries = Together(knowing(Updates(machine)))
    seen: list[Position] = []

    def own(since: Position) -> Updates:
        seen.append(since)
        return Updates()

    reader = look(own, peer_queries)
    assert tick(reader)["engines"] == [{"engine": 0}]
    peer_queries.others.clear()
    silent = tick(reader)
    assert silent["engines"] == [{"engine": 0}] and silent["steps"] == []
    tick(reader)
    assert [since.steps for since in seen] == [0, 7, 7], "nothing is skipped"


def test_requests_of_all_processes_those_first_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_REQUESTS_PER_EVENT", 4)
    one = Updates(requests=[told("a"), told("b", live=True)], dropped=2)
    two = Updates(requests=[told("c"), told("d"), told("e"), told("f")], dropped=1)
    said = tick(look(lambda since: one, Together(knowing(two))))
    assert [record["id"] for record in said["requests"]] == ["a", "c", "d", "e"]
    assert said["dropped"] == 2 + 1 + 1, "one that runs will be told of again"


def test_those_that_run_are_told_of_now_and_then() -> None:
    seen: list[Position] = []

    def own(since: Position) -> Updates:
        seen.append(since)
        return Updates()

    reader = look(own, Together())
    for _ in range(2 * LIVE_INTERVAL_COUNT + 1):
        tick(reader)
    assert [i for i, since in enumerate(seen) if since.live] == [
        0,
        LIVE_INTERVAL_COUNT,
        2 * LIVE_INTERVAL_COUNT,
    ]


def test_each_process_is_asked_on_from_what_it_said() -> None:
    asked: list[dict[int, int]] = []

    def own(since: Position) -> Updates:
        asked.append(since.ended)
        return Updates(source=1, ended=5)

    other = Together(knowing(Updates(source=2, ended=7)))
    reader = look(own, other)
    tick(reader)
    other.others = [knowing(Updates(source=3, ended=1))]
    tick(reader)
    tick(reader)
    assert asked == [{}, {1: 5, 2: 7}, {1: 5, 2: 7, 3: 1}], "who does not answer is not forgotten"


class Ended:
    """Process with records: `count` requests have ended in all, and some are running."""

    def __init__(self, count: int, live: int = 0, kept: int = 1024) -> None:
        self.numbers = list(range(count, max(0, count - kept), -1))
        self.live = live

    def newest(self, limit: int, now_s: float, *, live: bool = True, ended: bool = True) -> list[RequestEntry]:
        assert live != ended
        shown = self.numbers if ended else [0] * self.live
        return [record(number) for number in shown[:limit]]


def record(number: int) -> RequestEntry:
    return RequestEntry(
        number=number, live=not number, id=f"r{number}", request_id="", api="chat", model="m", stream=True,
        created_s=1.0, age_s=1.0, slo=None, outcome=None, finish="stop", reason="", status=200, prompt_tokens=1,
        cached_tokens=0, output_tokens=1, choices=1, seen=None, worst=SampleSummary(), route=None, rejection=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "count", "told", "dropped"),
    [
        ({}, 3, [3, 2, 1], 0),
        ({}, 9, [9, 8, 7, 6], 0),  # what was before anybody looked is not missed
        ({7: 5}, 5, [], 0),
        ({7: 5}, 7, [7, 6], 0),
        ({7: 5}, 12, [12, 11, 10, 9], 3),
        ({8: 5}, 2, [2, 1], 0),  # of another process
    ],
)
def test_requests_that_have_ended_are_told_of_once(
    before: dict[int, int], count: int, told: list[int], dropped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "MAX_REQUESTS_PER_EVENT", 4)
    new = updates.request_updates(Position(ended=before, live=False), 7, Ended(count), 0.0)  # type: ignore[arg-type]
    assert [orjson.loads(each.record)["id"] for each in new.requests] == [f"r{number}" for number in told]
    assert (new.source, new.ended, new.dropped) == (7, count, dropped)


def test_those_that_run_fill_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "MAX_REQUESTS_PER_EVENT", 4)
    new = updates.request_updates(Position(ended={7: 5}), 7, Ended(6, live=9), 0.0)  # type: ignore[arg-type]
    assert [each.live for each in new.requests] == [False, True, True, True] and not new.dropped


def test_routers_of_all_processes_together() -> None:
    parts = []
    for engine in (0, 1):
        tallies = MetricRegistry()
        routing = RoutingMetrics(tallies, "m")
        for known in (0, 1):
            routing.engine_added(known)
        routing.placed(engine, "prefix")
        routing.placed(1, "pace")
        routing.retried(0)
        routing.placed_again(0, "drain")
        routing.resumed(1, "death")
        parts.append(Updates(routed=updates.routed_numbers(tallies.numbers()), breakers=[1]))
    router = tick(look(lambda since: parts[0], Together(knowing(parts[1]))))["router"]
    assert router == {
        "placements": {"0": 1, "1": 3},
        "reasons": {"pace": 2, "prefix": 2},
        "retries": 2,
        "placed_again": {"death": 0, "drain": 2, "queue": 0, "quiet": 0},
        "resumes": {"death": 2, "drain": 0, "queue": 0, "quiet": 0},
        "breakers": [1],
    }
    assert tick(look(lambda since: Updates(), Together()))["router"] is None
    assert updates.routed_numbers(MetricRegistry().numbers()) is None


def test_nobody_is_asked_while_nobody_looks() -> None:
    peer_queries = Together()
    ConsoleReader(Service(ServerConfig(), "m", None), lambda since: Updates(), peer_queries)  # type: ignore[arg-type]
    assert peer_queries.asked == 0
