"""One `roseinfer serve` with the embedded model for the tests of this folder, and the same engine in this process."""

from collections.abc import Iterator

import openai
import pytest

from roseinfer import LLM
from tests.server.real_server import RealServer


@pytest.fixture(scope="package")
def shared() -> Iterator[RealServer]:
    with RealServer() as server:
        yield server


@pytest.fixture(scope="package")
def shared_client(shared: RealServer) -> Iterator[openai.OpenAI]:
    with shared.client() as client:
        yield client


@pytest.fixture
def real(shared: RealServer) -> Iterator[RealServer]:
    """The server shared by the tests that leave it as they found it: alive, and holding nothing."""
    yield shared
    shared.until_idle()
    assert shared.status("/health") == shared.status("/ready") == (200, None)


@pytest.fixture
def client(shared_client: openai.OpenAI, real: RealServer) -> openai.OpenAI:
    return shared_client


@pytest.fixture(scope="package")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_kv_blocks=80, max_num_seqs=16, threads=1) as made:
        yield made
