"""LoRA adapters of an `LLM`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import roseinfer
from roseinfer import LLM, LoRARequest, SamplingParams
from roseinfer.core.errors import InvalidRequestError

TERSE = str(Path(roseinfer.__file__).parent / "assets" / "terse")
SHORT = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_kv_blocks=64, max_num_seqs=4, threads=1, enable_lora=True) as made:
        yield made


def test_an_adapter_is_known_by_its_name_once_a_call_gave_its_path(llm: LLM) -> None:
    asked = [{"role": "user", "content": "Write a Python function that returns the sum of two numbers."}]
    texts = [
        llm.chat(asked, SHORT, lora_request=adapter)[0].outputs[0].text
        for adapter in (None, LoRARequest("terse", 1, TERSE), LoRARequest("terse"))
    ]
    assert texts[0] != texts[1] == texts[2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (LoRARequest("other"), "names no path, and no adapter is 'other'"),
        (LoRARequest("other", 1, "/none"), "/none holds no adapter_config.json"),
    ],
)
def test_adapters_that_cannot_be_used(llm: LLM, wrong: LoRARequest, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate("x", SHORT, lora_request=wrong)
    assert not llm.engine.core.busy
