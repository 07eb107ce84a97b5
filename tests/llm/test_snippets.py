"""Programs written for vLLM run with the import line changed."""

from collections.abc import Iterator
from typing import Any

import pytest

import roseinfer
from roseinfer import LLM
from tests.llm.snippets import SNIPPETS

SMALL = {"threads": 1, "num_kv_blocks": 128, "device": "cpu"}


@pytest.fixture
def small_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make engines of snippets small, and close them."""
    made: list[LLM] = []

    class SmallLLM(LLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **SMALL, **options)
            made.append(self)

    monkeypatch.setattr(roseinfer, "LLM", SmallLLM)
    yield
    for llm in made:
        llm.close()


@pytest.mark.parametrize("title", SNIPPETS)
def test_a_program_for_vllm_runs(title: str, small_llm: None) -> None:
    exec(compile(SNIPPETS[title], title, "exec"), {"MODEL": "tiny", "__name__": "__main__"})
