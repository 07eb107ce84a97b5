"""Engine on a GGUF file: the embedded model, saved as one, gives the same output as from its folder."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from roseinfer import LLM, SamplingParams
from roseinfer.core.errors import UnsupportedModelError
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.gguf_files import as_floats, metadata_of, tensors_of, write
from tests.helpers.held_out import TINY

PROMPTS = ["def fibonacci(", "import os\n\n", "class Node:\n    "]
PARAMS = SamplingParams(max_tokens=20, temperature=0)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 128}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the embedded model with its own tokenizer. GGUF files have no name for its pre-tokenization rule."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
    vocab = Tokenizer.from_folder(TINY).backend.get_vocab()
    tokens = sorted(vocab, key=lambda text: vocab[text])
    own = {"tokenizer.ggml.pre": "own", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 0}
    metadata = metadata_of(model, 4096) | own | {"tokenizer.ggml.eot_token_id": 1}
    metadata["tokenizer.ggml.token_type"] = [3 if text.startswith("<|") else 1 for text in tokens]
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", metadata, tensors_of(model, as_floats))


def test_a_gguf_file_gives_the_answers_of_its_folder(embedded: Path) -> None:
    with LLM("tiny", **OPTIONS) as llm:
        expected = [answer.outputs[0].text for answer in llm.generate(PROMPTS, PARAMS)]
    with LLM(str(embedded.parent), gguf_file=embedded.name, tokenizer="tiny", **OPTIONS) as llm:
        assert [answer.outputs[0].text for answer in llm.generate(PROMPTS, PARAMS)] == expected
        assert (llm.engine.info.facts.model_type, llm.engine.info.facts.vocab_size) == ("LlamaForCausalLM", 4096)
    assert all(expected)


def test_a_tokenizer_with_unknown_rules_is_rejected(embedded: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre = 'own' is not supported.*--tokenizer"):
        LLM(str(embedded), **OPTIONS)
