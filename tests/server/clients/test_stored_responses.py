"""Stored conversations with tools: through openai's client, and as langchain and the AI SDK continue them."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.server.clients.conftest import SEND, call, respond
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller

AGENTS = {"type": "namespace", "name": "agents", "description": "Other agents.", "tools": [SEND]}
CALLED = call("agents.send", text="hello")
PLAIN = call("send", text="hello")


def answer(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return "Done." if CALLED in prompt or PLAIN in prompt else "It is not known what was called."
    return CALLED if "agents" in prompt else PLAIN


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(), answer) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_result_of_a_call_is_sent(client: openai.OpenAI, stream: bool) -> None:
    first = respond(client, stream, input="hello", tools=[AGENTS])
    [item] = first.output
    assert (item.type, item.name, item.namespace) == ("function_call", "send", "agents")
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sent"}
    second = respond(client, stream, input=[result], previous_response_id=first.id, tools=[AGENTS])
    assert second.output_text == "Done."


def test_items_are_sent_as_references(client: openai.OpenAI) -> None:
    """The AI SDK does so, because it assumes that `store` is true."""
    user: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    first = client.responses.create(model="fake", input=[user], tools=[SEND])  # type: ignore[call-overload]
    [item] = first.output
    said: list[Any] = [user, {"type": "item_reference", "id": item.id}]
    said.append({"type": "function_call_output", "call_id": item.call_id, "output": "sent"})
    second: Any = client.responses.create(model="fake", input=said, tools=[SEND])  # type: ignore[call-overload]
    assert second.output_text == "Done."


def test_langchain_goes_on_from_the_previous_response(scripted: ScriptedServer) -> None:
    @tool
    def send(text: str) -> str:
        """Send a text."""
        return "sent"

    model = ChatOpenAI(
        model="fake",
        base_url=f"{scripted.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        use_responses_api=True,
        use_previous_response_id=True,
    ).bind_tools([send])
    said: list[Any] = [HumanMessage("hello")]
    called = model.invoke(said)
    assert isinstance(called, AIMessage) and called.tool_calls[0]["name"] == "send"
    said += [called, ToolMessage("sent", tool_call_id=called.tool_calls[0]["id"])]
    assert model.invoke(said).text == "Done."
