"""The real server with an engine of two processes: a rank that dies or stops ends every stream."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from roseinfer import LLM, SamplingParams
from tests.helpers.process_table import alive, children, command_line
from tests.server.real_server import RealServer, until

TWO = ("--device", "cpu", "--tensor-parallel-size", "2", "--stall-timeout", "3", "--engine-timeout", "1")
PROMPT = "def fibonacci("
LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "extra_body": {"ignore_eos": True}, "stream": True}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with RealServer(*TWO) as server:
        yield server


def family(server: RealServer) -> tuple[int, int]:
    """Return the processes of the engine: rank 0 and rank 1."""
    until(lambda: server.status("/ready") == (200, None))
    (engine,) = server.engines()
    (rank,) = [child for child in children(engine) if "roseinfer.ranks.process" in command_line(child)]
    return engine, rank


@pytest.fixture
def streams(server: RealServer) -> Iterator[list[Any]]:
    """Yield three streams that have begun."""
    with server.client() as client:
        begun: list[Any] = [client.completions.create(**LONG, prompt=PROMPT) for _ in range(3)]
        for stream in begun:
            next(stream)
        yield begun


def test_the_text_equals_that_of_one_process(server: RealServer) -> None:
    with LLM("tiny", num_kv_blocks=80, max_num_seqs=16, threads=1) as alone, server.client() as client:
        expected = alone.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))[0].outputs[0].text
        done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0.0)
    assert done.choices[0].text == expected


def check_the_end(server: RealServer, streams: list[Any], number: signal.Signals, *codes: str) -> tuple[int, int]:
    """Send a signal to rank 1 and check that the engine ends. Return the engine's former processes."""
    processes = family(server)
    os.kill(processes[1], number)
    for stream in streams:
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code in codes
    assert server.status("/health") == (503, "engine_unhealthy")
    until(lambda: not any(map(alive, processes)))
    return processes


@pytest.mark.exhaustive  # `tests/ranks` kills one beneath the server
def test_a_rank_that_is_killed_ends_the_engine(server: RealServer, streams: list[Any]) -> None:
    gone = check_the_end(server, streams, signal.SIGKILL, "engine_dead")
    assert "the process of rank 1 ended with code -9" in server.log()
    assert set(family(server)).isdisjoint(gone), "they have been replaced"


def test_a_rank_that_is_stopped_makes_the_engine_time_out(server: RealServer, streams: list[Any]) -> None:
    """Streams end with the timeout, or with the kill that follows it."""
    check_the_end(server, streams, signal.SIGSTOP, "engine_unhealthy", "engine_dead")
    log = server.log()
    waited = log.partition("stacks of its threads when it did not respond")[2]
    assert "in all_reduce" in waited or "in gather" in waited, "rank 0 waited for the one that was stopped"
