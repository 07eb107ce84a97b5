"""Predicted outputs of chats: from OpenAI's client to drafts, without effect on the answer."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from roseinfer.core.config.speculation import AutoValues
from roseinfer.sched.drafting.build import make_drafting
from tests.helpers.drafters import EveryDraft
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller

ANSWER = "The quick brown fox jumps over the lazy dog. Then it sleeps under the old oak tree until noon."
PREDICTED = "The quick brown fox jumps over the lazy cat. Then it sleeps under the old oak tree until noon."
CONTENTS: list[Any] = [PREDICTED, [{"type": "text", "text": PREDICTED[:40]}, {"type": "text", "text": PREDICTED[40:]}]]


@pytest.fixture(scope="module")
def plain() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(), lambda prompt: ANSWER) as server:
        yield server


@pytest.fixture(scope="module")
def speculating() -> Iterator[ScriptedServer]:
    drafting = make_drafting(AutoValues(), EveryDraft(), share_outputs=False)
    with ScriptedServer(tool_caller(), lambda prompt: ANSWER, drafting=drafting) as server:
        yield server


def ask(server: ScriptedServer, **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Say it."}], max_tokens=200, **fields
        )
        return list(answer) if fields.get("stream") else answer  # a closed client reads no more of a stream


@pytest.mark.parametrize("content", CONTENTS, ids=["text", "parts"])
def test_a_predicted_answer_takes_fewer_steps(speculating: ScriptedServer, content: Any) -> None:
    before = speculating.call(speculating.engine.stats).step
    answer = ask(speculating, n=2, prediction={"type": "content", "content": content})
    steps = speculating.call(speculating.engine.stats).step - before
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert answer.model_extra.get("warnings") is None
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > answer.usage.completion_tokens / 2
    assert 0 < details.rejected_prediction_tokens < 40
    assert steps < answer.usage.completion_tokens / 4


def test_a_prediction_that_is_wrong_changes_nothing(speculating: ScriptedServer) -> None:
    for content in ("", "Something else entirely, and nothing of it is ever said.", []):
        answer = ask(speculating, prediction={"type": "content", "content": content})
        assert answer.choices[0].message.content == ANSWER


def test_a_stream_has_the_same_answer(speculating: ScriptedServer) -> None:
    chunks = ask(speculating, stream=True, prediction={"type": "content", "content": PREDICTED})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_without_speculation_it_has_no_effect(plain: ScriptedServer) -> None:
    answer = ask(plain, prediction={"type": "content", "content": PREDICTED})
    assert answer.choices[0].message.content == ANSWER and answer.model_extra.get("warnings") is None


@pytest.mark.parametrize("server", ["plain", "speculating"])
@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("text", "prediction"),
        ({"type": "tokens", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "parts of type 'image_url' are not supported"),
        ({"type": "content", "content": [{"type": "text"}]}, "a text part needs its 'text'"),
    ],
)
def test_wrong_predictions_are_refused(
    server: str, prediction: Any, message: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        ask(request.getfixturevalue(server), prediction=prediction)
    assert str(error.value.param).startswith("prediction")


def test_a_prediction_beyond_the_context_is_refused(speculating: ScriptedServer) -> None:
    with pytest.raises(openai.BadRequestError, match="the prediction has 500000 characters") as error:
        ask(speculating, prediction={"type": "content", "content": "x" * 500_000})
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "prediction")
