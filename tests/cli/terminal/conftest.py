from collections.abc import Iterator

import pytest

from roseinfer.text.tokenizer import Tokenizer
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_level


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def shared(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with LiveServer(tokenizer) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """Server around a fake engine, shared by this folder; the engine is reset for each test."""
    shared.call(shared.engine.reset)
    yield shared
    shared.until(lambda: shared.engine.live == [])
