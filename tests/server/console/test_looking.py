"""What a reader is told of several processes, one of which owns the engines."""

import asyncio
from itertools import pairwise
from typing import Any

import orjson
import pytest

from roseinfer.core.config import ServerConfig
from roseinfer.core.outputs import SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState, StepRecord
from roseinfer.server.console import looking, news
from roseinfer.server.console.looking import Look, tell, tell_of_machine
from roseinfer.server.console.news import Machine, News, Since, Told
from roseinfer.server.console.steps import NewSteps
from roseinfer.server.observe.colleagues import Colleagues
from roseinfer.server.observe.metrics import StepMetrics
from roseinfer.server.observe.routing import RoutingMetrics
from roseinfer.server.observe.tallies import Tallies
from roseinfer.server.request.service import Service


class Together(Colleagues):
    """Asks those that it is given, by the same bytes that would travel."""

    def __init__(self, *others: Colleagues) -> None:
        super().__init__()
        self.others = list(others)
        self.asked = 0

    async def ask(self, topic: str, body: bytes) -> list[bytes]:
        self.asked += 1
        answers = [other.answer(topic, body) for other in self.others]
        return [answer for answer in answers if answer is not None]


def knowing(known: News) -> Colleagues:
    colleagues = Colleagues()
    tell(colleagues, lambda since: known)
    return colleagues


def told(name: str, live: bool = False) -> Told:
    return Told(live, orjson.dumps({"id": name}))


def look(own: Any, colleagues: Colleagues) -> Look:
    return Look(Any, own, colleagues)  # type: ignore[arg-type]


def tick(reader: Look) -> dict[str, Any]:
    return orjson.loads(orjson.dumps(asyncio.run(reader.tick())))  # type: ignore[no-any-return]


class Crew:
    def reports(self) -> list[EngineReport]:
        stats = SchedulerStats(running=1)
        return [EngineReport(i, EngineState.READY, EngineHealth(True, 0.1), stats) for i in range(2)]

    def on_step(self, listener: Any) -> None:
        raise AssertionError


def test_engines_and_steps_come_from_their_owner_alone() -> None:
    steps, manager = StepMetrics(Tallies(), "m", keep=10), Colleagues()
    tell_of_machine(manager, steps, Crew())
    reader = look(lambda since: News(), Together(knowing(News()), manager))
    steps.step(1, StepRecord(5, 0.01, budget_s=0.02))
    first = tick(reader)
    assert [engine["engine"] for engine in first["engines"]] == [0, 1]
    assert [(step[0], step[3], step[6]) for step in first["steps"]] == [(1, 20.0, 5)]
    assert tick(reader)["steps"] == []
    steps.step(0, StepRecord(6, 0.01))
    assert [step[6] for step in tick(reader)["steps"]] == [6]


def test_an_owner_that_does_not_answer_has_said_something_before() -> None:
    machine = Machine([{"engine": 0}], NewSteps(7, [], 0))
    colleagues = Together(knowing(News(machine)))
    seen: list[Since] = []

    def own(since: Since) -> News:
        seen.append(since)
        return News()

    reader = look(own, colleagues)
    assert tick(reader)["engines"] == [{"engine": 0}]
    colleagues.others.clear()
    silent = tick(reader)
    assert silent["engines"] == [{"engine": 0}] and silent["steps"] == []
    tick(reader)
    assert [since.steps for since in seen] == [0, 7, 7], "nothing is skipped"


def test_requests_of_all_processes_those_first_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MAX_REQUESTS_TOLD", 4)
    one = News(requests=[told("a"), told("b", live=True)], dropped=2)
    two = News(requests=[told("c"), told("d"), told("e"), told("f")], dropped=1)
    said = tick(look(lambda since: one, Together(knowing(two))))
    assert [record["id"] for record in said["requests"]] == ["a", "c", "d", "e"]
    assert said["dropped"] == 2 + 1 + 1, "one that runs will be told of again"


def test_those_that_run_are_told_of_now_and_then() -> None:
    seen: list[Since] = []

    def own(since: Since) -> News:
        seen.append(since)
        return News()

    reader = look(own, Together())
    for _ in range(2 * looking.LIVE_EVERY + 1):
        tick(reader)
    assert [i for i, since in enumerate(seen) if since.live] == [0, looking.LIVE_EVERY, 2 * looking.LIVE_EVERY]
    assert seen[0].at_s == 0 and all(a.at_s <= b.at_s for a, b in pairwise(seen))


def test_routers_of_all_processes_together() -> None:
    parts = []
    for engine in (0, 1):
        tallies = Tallies()
        routing = RoutingMetrics(tallies, "m", 2)
        routing.placed(engine, "prefix")
        routing.placed(1, "pace")
        routing.retried(0)
        routing.placed_again(0, "drain")
        routing.resumed(1, "death")
        parts.append(News(routed=news.routed_news(tallies.numbers()), breakers=[1]))
    router = tick(look(lambda since: parts[0], Together(knowing(parts[1]))))["router"]
    assert router == {
        "placements": {"0": 1, "1": 3},
        "reasons": {"pace": 2, "prefix": 2},
        "retries": 2,
        "placed_again": {"death": 0, "drain": 2, "quiet": 0},
        "resumes": {"death": 2, "drain": 0, "quiet": 0},
        "breakers": [1],
    }
    assert tick(look(lambda since: News(), Together()))["router"] is None
    assert news.routed_news(Tallies().numbers()) is None


def test_nobody_is_asked_while_nobody_looks() -> None:
    colleagues = Together()
    Look(Service(ServerConfig(), "m", None), lambda since: News(), colleagues)  # type: ignore[arg-type]
    assert colleagues.asked == 0
