"""A model that generates text rejects the routes of prompt-only requests by name."""

from collections.abc import Iterator
from typing import Any

import pytest

from roseinfer.server.formats.pooling.scoring import RERANK_PATHS, SCORE_PATHS
from roseinfer.text.tokenizer import Tokenizer
from tests.server.live import LiveServer

BODIES: dict[str, dict[str, Any]] = (
    {"/v1/embeddings": {"input": "x"}, "/v2/embed": {"texts": ["x"]}}
    | {path: {"query": "x", "documents": ["y"]} for path in RERANK_PATHS}
    | {path: {"text_1": "x", "text_2": "y"} for path in SCORE_PATHS}
)


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    with LiveServer(tokenizer) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_task_is_rejected(server: LiveServer, path: str) -> None:
    answer = server.post(path, BODIES[path])
    found = answer.json()["error"]
    assert (answer.status_code, found["code"], found["param"]) == (400, "unsupported_task", "model")
    assert found["message"].startswith(f"The model 'fake' does not support {path}: it generates text")
    assert not server.engine.requests


def test_card_names_the_task(server: LiveServer) -> None:
    [card] = server.get("/v1/models").json()["data"]
    assert (card["task"], card["embedding_dimensions"]) == ("generate", None)
