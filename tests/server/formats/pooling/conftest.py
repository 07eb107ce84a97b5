"""A server of embeddings and one of scores, each with a fake engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from roseinfer.core.pooling import PoolingInfo, PoolingMethod, PoolingTask
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.engine_info import changed
from tests.server.fake_engine import INFO, WIDTH
from tests.server.live import LiveServer

PROMPTS = {"query": "def ", "document": ""}


def pooling(**values: Any) -> PoolingInfo:
    given: dict[str, Any] = {"task": PoolingTask.EMBED, "method": PoolingMethod.LAST, "width": WIDTH}
    return PoolingInfo(**(given | {"prompts": PROMPTS} | values))


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """The server of `server`, with embeddings that may be shortened to 2 numbers."""
    with LiveServer(tokenizer, info=changed(INFO, pooling=pooling(any_dimension_from=2))) as server:
        yield server
