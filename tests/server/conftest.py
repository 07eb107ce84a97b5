from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import openai
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.server.http.limits import Limits
from roseinfer.text.tokenizer import Tokenizer
from tests.server.live import PATIENCE_S, LiveServer
from tests.text.tokenizers import byte_level

Serve = Callable[..., LiveServer]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Iterator[Serve]:
    """`serve(limits=..., **server options)` starts a server of one's own."""
    with ExitStack() as stack:

        def start(limits: dict[str, Any] | None = None, **options: Any) -> LiveServer:
            config = ServerConfig(**options)
            given = None if limits is None else replace(Limits.of(config), **limits)
            return stack.enter_context(LiveServer(tokenizer, config, given))

        yield start


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with LiveServer(tokenizer) as server:
        yield server


@pytest.fixture
def server(shared: LiveServer) -> Iterator[LiveServer]:
    """A server with default options, shared by the tests of a file; the engine is reset for each."""
    engine = shared.engine
    shared.call(engine.reset)
    yield shared
    assert shared.call(lambda: engine.live) == [], "a request was left in the engine"


@pytest.fixture(scope="module")
def shared_client(shared: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.fixture
def client(shared_client: openai.OpenAI, server: LiveServer) -> openai.OpenAI:
    return shared_client
