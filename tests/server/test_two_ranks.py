"""The real server with an engine of two processes: a rank that dies or stops ends every stream, and nothing is left."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.llm import LLM
from tests.server.real_server import RealServer, alive, children, command_line, until

TWO = ("--device", "cpu", "--tensor-parallel-size", "2", "--stall-timeout", "2", "--engine-timeout", "1")
PROMPT = "def fibonacci("
LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "extra_body": {"ignore_eos": True}, "stream": True}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with RealServer(*TWO) as server:
        yield server


def family(server: RealServer) -> tuple[int, int]:
    """The processes of the engine: rank 0, and rank 1."""
    until(lambda: server.status("/ready") == (200, None))
    (engine,) = server.engines()
    (rank,) = [child for child in children(engine) if "roseinfer.ranks.process" in command_line(child)]
    return engine, rank


@pytest.fixture
def streams(server: RealServer) -> Iterator[list[Any]]:
    """Three that have begun."""
    with server.client() as client:
        begun: list[Any] = [client.completions.create(**LONG, prompt=PROMPT) for _ in range(3)]
        for stream in begun:
            next(stream)
        yield begun


def test_the_text_is_that_of_one_process(server: RealServer) -> None:
    with LLM("tiny", num_kv_blocks=80, max_num_seqs=16, threads=1) as alone, server.client() as client:
        expected = alone.generate(PROMPT, SamplingParams(max_tokens=24, temperature=0.0))[0].text
        done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0.0)
    assert done.choices[0].text == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, "engine_dead"), (signal.SIGSTOP, "engine_unhealthy")])
def test_without_a_rank_there_is_no_engine(
    server: RealServer, streams: list[Any], number: signal.Signals, code: str
) -> None:
    """A killed rank is seen at once; a stopped one is one more way for the engine to be silent for too long."""
    processes = family(server)
    os.kill(processes[1], number)
    for stream in streams:
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code == code
    assert server.status("/health") == (503, "engine_unhealthy")
    until(lambda: not any(map(alive, processes)))
    assert set(family(server)).isdisjoint(processes), "others have taken their place"


def test_the_log_says_what_has_happened(server: RealServer) -> None:
    log = server.log()
    assert "the process of rank 1 ended with code -9" in log
    waited = log.partition("where its threads were when it gave no sign of life")[2]
    assert "in all_reduce" in waited or "in gather" in waited, "rank 0 waited for the one that was stopped"
