"""Two real engine processes that freeze or are killed by a request, under requests of all kinds."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from roseinfer.core.errors import EngineLostError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import EngineState, GenerateRequest
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.transport import UnixSocketTransport
from roseinfer.text.output import CallStart, Reasoning, Text
from roseinfer.text.reasoning import Reasoner
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import Tool, grammar
from roseinfer.text.tools.registry import tool_format
from tests.helpers.fragile_engine import POISON, FragileTransport
from tests.helpers.in_loop import until
from tests.helpers.live_fleet import FleetWork, LiveFleet, Stream, ended, fleet_runner, make_requests

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 60}}, "required": ["city"]}
SCHEMA = json.dumps({**CITY, "additionalProperties": False})


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[FleetWork], None]]:
    """Run work with the fleet, in the event loop that it belongs to."""
    with fleet_runner(make=FragileTransport) as found:
        yield found


def constrained(tokenizer: Tokenizer) -> list[GenerateRequest]:
    """Return requests with a schema or tools, reasoning with a budget, and with or without a stop string."""
    calls = tool_format("hermes", tokenizer)
    tools = [Tool("weather", CITY, strict=True)]
    called = calls.rules(tools, 2, lambda schema, strict: SCHEMA)
    reasoner = Reasoner("<think>", "</think>", tokenizer)
    thinking = reasoner.thinking(True, 20, " enough")
    read, think = partial(calls.parser, tools), lambda: reasoner.parser(True, calls.parser(tools), bare=True)
    guides = {
        "document": (GuideSpec(grammar=f"start: %json {SCHEMA}"), None),
        "calls": (GuideSpec(grammar=grammar(called)), read),
        "perhaps": (GuideSpec(triggers=calls.triggers(tools, 2, lambda schema, strict: SCHEMA)), read),
        "thought": (GuideSpec(grammar=grammar(called, after_thinking=True), thinking=thinking), think),
        "thought document": (GuideSpec(grammar=f"start: %json {SCHEMA}", thinking=thinking), think),
    }
    requests = []
    for number, (name, (guide, parser)) in enumerate(guides.items()):
        for stop in ((), ("e",)):
            params = SequenceParams(max_tokens=45, temperature=1.0, seed=number, stop=stop)
            prompt = tokenizer.encode(f"# {name}\ndef weather(")
            name_of = f"{name}-{len(stop)}"
            requests.append(
                GenerateRequest(request_id=name_of, prompt=Prompt(prompt, params, guide=guide), parser=parser)
            )
    return requests


def again(streams: list[Stream], name: str) -> list[GenerateRequest]:
    return [replace(stream.request, request_id=f"{name}-{stream.request.request_id}") for stream in streams]


def check_same(streams: list[Stream], expected: list[Stream]) -> None:
    for stream, wanted in zip(streams, expected, strict=True):
        assert stream.error is None, stream.request.request_id
        assert stream.same(wanted), stream.request.request_id


def begun(streams: list[Stream]) -> int:
    """Return how many requests have started all of their choices, each of which takes a seat."""
    return sum(len(stream.ids) == stream.request.n and all(stream.ids.values()) for stream in streams)


def test_two_engines_give_the_output_of_one(run: Callable[[FleetWork], None]) -> None:
    async def work(fleet: LiveFleet) -> None:
        rng = random.Random(1)
        requests = make_requests(fleet.tokenizer, 80, rng, max_tokens=4)
        one = await AsyncEngine.start(
            UnixSocketTransport(fleet.supervisor.addresses[0]), fleet.tokenizer, prefix="one-"
        )
        alone = [Stream(request) for request in requests]
        for stream in alone:
            one.submit(stream.request, stream)
        await ended(alone)
        await one.close()
        before = [report.stats.steps_done for report in fleet.engine.reports()]
        check_same(await fleet.run(requests), alone)
        await fleet.until_empty()
        after = [report.stats.steps_done for report in fleet.engine.reports()]
        assert all(late > early for early, late in zip(before, after, strict=True)), "both have worked"

    run(work)


def test_requests_of_a_frozen_engine_continue_on_another(run: Callable[[FleetWork], None]) -> None:
    async def work(fleet: LiveFleet) -> None:
        requests = make_requests(fleet.tokenizer, 12, random.Random(5), max_tokens=30)
        expected = await fleet.run(requests)
        frozen = fleet.pids[0]
        streams = fleet.start(again(expected, "frozen"))
        await until(lambda: begun(streams) >= 8)
        os.kill(frozen, signal.SIGSTOP)
        try:
            await ended(streams)
            assert EngineState.QUIET in [report.state for report in fleet.engine.reports()]
            others = await fleet.run(again(expected, "meanwhile"))
        finally:
            os.kill(frozen, signal.SIGCONT)
        check_same(streams, expected)
        check_same(others, expected)
        await fleet.until_up()
        assert [report.deaths for report in fleet.supervisor.reports()] == [0, 0]

    run(work)


def test_a_request_that_ends_an_engine_ends_alone(run: Callable[[FleetWork], None]) -> None:
    async def work(fleet: LiveFleet) -> None:
        requests = make_requests(fleet.tokenizer, 8, random.Random(3), max_tokens=45)
        expected = await fleet.run([*constrained(fleet.tokenizer), *requests])
        said = [event for stream in expected for event in stream.events]
        assert {CallStart, Reasoning, Text} <= {type(event) for event in said}
        streams = fleet.start(again(expected, "beside"))
        await until(lambda: begun(streams) == len(streams))
        (poisoned,) = fleet.start(
            [GenerateRequest(request_id="poison", prompt=Prompt([POISON, 40, 41], SequenceParams(max_tokens=9)))]
        )
        await ended([*streams, poisoned])
        assert isinstance(poisoned.error, EngineLostError) and "planted poison" in str(poisoned.error)
        check_same(streams, expected)
        await until(lambda: any(report.deaths for report in fleet.supervisor.reports()))
        assert sum(report.deaths for report in fleet.supervisor.reports()) == 1

    run(work)
