"""GGUF file of a real model, read by roseinfer and by transformers: same tensors, tokens and answers."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from roseinfer import LLM, SamplingParams
from roseinfer.models.config import read_model_spec
from roseinfer.models.gguf_weights import GgufWeights
from tests.helpers.real_model import REAL_MODEL, needs_real_model
from tests.helpers.weights import BUILD

pytestmark = [needs_real_model, pytest.mark.long, pytest.mark.exhaustive]

CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Who are you?"}],
    [
        {"role": "user", "content": "Say: it's 7 o'clock."},
        {"role": "assistant", "content": "It's 7 o'clock."},
        {"role": "user", "content": "And in French (fran\u00e7ais)?"},
    ],
]
ANSWER_TOKENS = 16


@pytest.fixture(scope="module")
def reference() -> Iterator[PreTrainedModel]:
    """Load the model with transformers, once: it parses the file twice and names each module's tensors."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield AutoModelForCausalLM.from_pretrained(
            REAL_MODEL.parent, gguf_file=REAL_MODEL.name, dtype=torch.float32
        ).eval()


def test_tensors_are_the_same_to_the_bit(reference: PreTrainedModel) -> None:
    with GgufWeights(REAL_MODEL, read_model_spec(REAL_MODEL), BUILD) as weights:
        for name, expected in reference.state_dict().items():
            if name == "lm_head.weight":  # tied
                continue
            found = torch.empty_like(expected)
            weights.read(name, found)
            assert torch.equal(found, expected), name
        weights.refuse_unread()


def test_greedy_chats_are_the_same(reference: PreTrainedModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(REAL_MODEL.parent, gguf_file=REAL_MODEL.name)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)
    with LLM(str(REAL_MODEL), device="cpu", dtype="float32", max_model_len=256) as llm:
        answers = []
        for chat in CHATS:
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
            expected = reference.generate(prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            (answer,) = llm.chat(chat, params)
            assert answer.prompt_token_ids == prompt[0].tolist()
            assert answer.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()
            answers.append(answer.outputs[0].text)
    assert answers[0] == "The capital of France is Paris."
