"""langchain-openai against the server: langchain's own tests of chat models."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.server.live import PATIENCE_S
from tests.server.scripted_server import ScriptedServer

# One for all: the client keeps its connections, which are a loop's.
LOOP = asyncio.Runner()


@pytest.fixture(scope="module", autouse=True)
def loop_ends() -> Iterator[None]:
    yield
    LOOP.close()


def in_a_loop(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        LOOP.run(test(*args, **kwargs))

    return run


def without_plugins(cases: type) -> type:
    """Asynchronous tests run without a plugin, and none is there that records or measures."""
    for name, test in inspect.getmembers(cases, inspect.iscoroutinefunction):
        setattr(cases, name, in_a_loop(test))
    for name in ("test_stream_time", "test_no_overrides_DO_NOT_OVERRIDE"):
        setattr(cases, name, None)
    return cases


@without_plugins
class TestChatModel(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def served(self, scripted: ScriptedServer) -> None:
        self.url = scripted.url

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        where = {"model": "fake", "base_url": f"{self.url}/v1", "api_key": "none"}
        return {**where, "max_retries": 0, "timeout": PATIENCE_S, "stream_usage": True}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}


@pytest.mark.exhaustive  # `test_harmony` and `end_to_end/test_other_apis` use the API through its maker's client
class TestThroughResponses(TestChatModel):
    """The same over `/v1/responses`."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
