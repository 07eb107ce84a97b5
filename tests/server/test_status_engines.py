"""/health, /ready and /load of several engines, and what clients are told while none takes requests."""

from collections.abc import Iterator

import pytest

from roseinfer.core.errors import EngineUnavailableError
from roseinfer.core.outputs import SchedulerStats
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState
from roseinfer.server import answer_shapes
from tests.server.live import LiveServer

READY, DRAINING, DEAD = EngineState.READY, EngineState.DRAINING, EngineState.DEAD
STARTING, QUIET = EngineState.STARTING, EngineState.QUIET
BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "model": "fake"},
}


@pytest.fixture
def fleet(server: LiveServer) -> Iterator[LiveServer]:
    yield server
    server.engine.fleet, server.engine.returns = None, False


def become(server: LiveServer, *states: EngineState) -> None:
    stats = SchedulerStats(running=3, waiting=1, blocks_used=1, blocks_total=4)
    reports = [EngineReport(i, state, EngineHealth(True, 0.5), stats, restarts=i) for i, state in enumerate(states)]
    server.engine.fleet = reports
    server.engine.alive = any(state in (READY, DRAINING, QUIET) for state in states)
    server.engine.returns = True


def test_each_engine_is_told_of(fleet: LiveServer) -> None:
    become(fleet, READY, STARTING)
    health, load = fleet.get("/health").json(), fleet.get("/load").json()
    assert health == {
        "status": "ok",
        "engines": [
            {"engine": 0, "state": "ready", "heartbeat_age_s": 0.5, "restarts": 0},
            {"engine": 1, "state": "starting", "heartbeat_age_s": 0.5, "restarts": 1},
        ],
    }
    assert load == {
        "server_load": 0,
        "engines": [
            {"engine": 0, "running": 3, "waiting": 1, "kv_cache_usage": 0.25},
            {"engine": 1, "running": 0, "waiting": 0, "kv_cache_usage": 0.0},
        ],
    }
    assert fleet.get("/ready").json() == {"status": "ready", "engines": health["engines"]}
    answer_shapes.Health.model_validate(health)
    answer_shapes.Load.model_validate(load)


@pytest.mark.parametrize(
    ("states", "health", "ready"),
    [
        ((READY, DEAD), 200, 200), ((DEAD, QUIET), 200, 503), ((QUIET, QUIET), 200, 503), ((QUIET,), 200, 200),
        ((DRAINING, READY), 200, 200),
        ((DRAINING, DEAD), 200, 503), ((DRAINING,), 200, 503), ((DEAD, STARTING), 503, 503), ((STARTING,), 503, 503),
    ],
)  # fmt: skip
def test_health_while_one_lives_and_ready_while_one_takes_requests(
    fleet: LiveServer, states: tuple[EngineState, ...], health: int, ready: int
) -> None:
    become(fleet, *states)
    for path, status in (("/health", health), ("/ping", health), ("/ready", ready)):
        answer = fleet.get(path)
        assert answer.status_code == status, path
        if status == 503:
            assert answer.json()["error"]["code"] == "engine_unhealthy" and int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", BODIES)
def test_without_an_engine_every_api_says_when_to_come_back(fleet: LiveServer, path: str) -> None:
    become(fleet, DEAD, STARTING)
    answer = fleet.post(path, BODIES[path])
    assert answer.status_code == 503 and "x-should-retry" not in answer.headers
    assert "restart is in progress" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("gone_s", "wait_s"), [(0.5, 43), (33.2, 10), (200.0, 3)])
def test_when_an_engine_is_expected_back(fleet: LiveServer, gone_s: float, wait_s: int) -> None:
    """The engine took 40 s to start. An overdue one may return at any moment."""
    become(fleet, STARTING)
    fleet.engine.heartbeat_age_s = gone_s
    fleet.engine.info.facts.startup_s["engine"] = 40.0
    try:
        assert fleet.get("/health").headers["retry-after"] == str(wait_s)
        become(fleet, DRAINING)
        fleet.engine.heartbeat_age_s = 0.0
        assert fleet.get("/ready").headers["retry-after"] == "43", "all of its start is yet to come"
    finally:
        del fleet.engine.info.facts.startup_s["engine"]
        fleet.engine.heartbeat_age_s = 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_lost_between_the_door_and_the_router(fleet: LiveServer, stream: bool) -> None:
    def refuse(*anything: object) -> None:
        raise EngineUnavailableError("engine 0 is starting, at 10.0.0.1", 6.2)

    fleet.engine.submit = refuse  # type: ignore[method-assign,assignment]
    try:
        answer = fleet.post("/v1/completions", {"prompt": "x", "stream": stream})
    finally:
        del fleet.engine.submit
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unhealthy")
    assert answer.headers["retry-after"] == "7" and "10.0.0.1" not in answer.text
