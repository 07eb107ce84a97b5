"""`LLM.embed` and `LLM.score`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roseinfer import LLM
from roseinfer.core.errors import InvalidRequestError, RequestFailedError, RequestTooLongError
from tests.helpers.checkpoints import make_reference
from tests.helpers.encoders import RERANKERS, VOCAB, make_encoder
from tests.helpers.sentence_folders import add_modules
from tests.helpers.tokenizers import byte_tokenizer
from tests.text.test_pooling_inputs import backend, conversation

BYTES = 300  # ids of the byte tokenizer, and some
OPTIONS = {"threads": 1, "num_kv_blocks": 256, "max_num_seqs": 8, "device": "cpu", "dtype": "float32"}
TEXTS = ["one", "a longer text of some words", "x", "one"]


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of bytes, whose vocabulary also has "yes" and "no"."""
    spec = json.loads(byte_tokenizer().backend.to_str())
    spec["model"]["vocab"] |= {"yes": 257, "no": 258}
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


@pytest.fixture(scope="module")
def model():
    return make_reference("qwen3", vocab_size=BYTES, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3") / "tiny-qwen3-embedding"
    model.model.save_pretrained(path)
    prompts = {"query": "find: ", "document": ""}
    return add_modules(write_tokenizer(path), {"pooling_mode": "lasttoken"}, prompts=prompts)


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as made:
        yield made


def expected(model, text: str) -> torch.Tensor:
    with torch.inference_mode():
        return F.normalize(model.model(torch.tensor([list(text.encode())])).last_hidden_state[0, -1], dim=0)


def test_embeddings_are_those_of_transformers_in_order(embedder: LLM, model) -> None:
    results = embedder.embed(TEXTS, use_tqdm=False)
    for text, result in zip(TEXTS, results, strict=True):
        torch.testing.assert_close(torch.tensor(result.embedding), expected(model, text), atol=1e-5, rtol=0)
        assert (result.prompt, result.prompt_token_ids) == (text, list(text.encode()))
        assert result.outputs.embedding == result.embedding
    (from_ids,) = embedder.embed(list(b"one"))
    assert from_ids.prompt is None
    torch.testing.assert_close(torch.tensor(from_ids.embedding), torch.tensor(results[0].embedding), atol=1e-5, rtol=0)
    assert embedder.embed([]) == []


def test_prompts_and_dimensions(embedder: LLM, model) -> None:
    (result,) = embedder.embed("one", prompt_name="query", dimensions=32)
    assert result.prompt == "find: one"
    torch.testing.assert_close(torch.tensor(result.embedding), expected(model, "find: one"), atol=1e-5, rtol=0)
    with pytest.raises(InvalidRequestError, match="unknown prompt_name 'x'; the model's prompts: query, document"):
        embedder.embed("one", prompt_name="x")
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: dimensions is 33, but embeddings have 32"):
        embedder.embed(["one", "two"], dimensions=33)


def test_long_inputs_are_errors_unless_they_are_cut(embedder: LLM) -> None:
    with pytest.raises(RequestTooLongError, match=r"prompts\[1\]: This model's maximum context length is 1024"):
        embedder.embed(["a", "b" * 1025])
    cut = embedder.embed(["b" * 1025, [98] * 1025], truncate_prompt_tokens=-1)
    assert [len(result.prompt_token_ids) for result in cut] == [1024, 1024]
    assert embedder.embed("abc", truncate_prompt_tokens=2)[0].prompt_token_ids == list(b"ab")
    for wrong in (0, -2, "1", 1025):
        with pytest.raises((InvalidRequestError, TypeError), match="truncate_prompt_tokens"):
            embedder.embed("a", truncate_prompt_tokens=wrong)


def test_another_task_is_an_error(embedder: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="does not generate text: call embed"):
        embedder.generate("one")
    with LLM("tiny", **OPTIONS) as generates, pytest.raises(InvalidRequestError, match="runner='pooling'"):
        generates.embed("one")


def test_scores_of_an_embedding_model_are_cosines(embedder: LLM, model) -> None:
    scores = embedder.score("one", TEXTS)
    for text, result in zip(TEXTS, scores, strict=True):
        assert result.score == pytest.approx(float(expected(model, "one") @ expected(model, text)), abs=1e-5)
    with pytest.raises(InvalidRequestError, match="instruction is not supported"):
        embedder.score("one", TEXTS, instruction="find it")
    with pytest.raises(InvalidRequestError, match="2 queries and 4 documents"):
        embedder.score(["one", "two"], TEXTS)
    with pytest.raises(InvalidRequestError, match="documents must be text"):
        embedder.score("one", [1])


def test_a_failed_input_is_named(tmp_path: Path) -> None:
    broken = make_reference("gpt2", vocab_size=BYTES)
    with torch.no_grad():
        broken.transformer.wte.weight[ord("!")] = 3e38
    broken.save_pretrained(tmp_path)
    with LLM(write_tokenizer(tmp_path), runner="pooling", **OPTIONS) as llm:
        with pytest.raises(RequestFailedError, match=r"prompts\[1\]: .*not finite"):
            llm.embed(["good", "b!d", "good"])
        assert len(llm.embed("good")) == 1


def test_scores_of_qwen3_reranker_are_probabilities_of_yes(model, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "Qwen3-Reranker-tiny")
    documents = ["it is me", "or you", "nobody"]
    with LLM(write_tokenizer(tmp_path / "Qwen3-Reranker-tiny"), **OPTIONS) as llm:
        for instruction in (None, "who is it?"):
            results = llm.score("who?", documents, instruction=instruction)
            for document, result in zip(documents, results, strict=True):
                task = instruction or "Given a web search query, retrieve relevant passages that answer the query"
                ids = list(conversation("who?", document, task).encode())
                assert result.prompt_token_ids == ids
                with torch.inference_mode():
                    logits = model(torch.tensor([ids])).logits[0, -1]
                want = torch.softmax(logits[[258, 257]], dim=0)[1]
                assert result.score == result.outputs.score == pytest.approx(float(want), abs=1e-5)
        assert results[1].num_cached_tokens > 0
        with pytest.raises(InvalidRequestError, match="the task of this model is score, not embed"):
            llm.embed("one")


def test_scores_of_a_cross_encoder_are_those_of_transformers(tmp_path: Path) -> None:
    reference = make_encoder(RERANKERS["bert"])
    reference.save_pretrained(tmp_path)
    backend().save(str(tmp_path / "tokenizer.json"))
    assert len(backend().get_vocab()) <= VOCAB
    documents = ["d e f", "g", "h i j k l m n o p a b c d"]
    with LLM(tmp_path, threads=1, dtype="float32", device="cpu") as llm:
        for document, result in zip(documents, llm.score("a b", documents), strict=True):
            both = backend().encode("a b", document)
            inputs = {"input_ids": torch.tensor([both.ids]), "token_type_ids": torch.tensor([both.type_ids])}
            with torch.inference_mode():
                want = torch.sigmoid(reference(**inputs).logits[0, 0])
            assert result.score == pytest.approx(float(want), abs=1e-5)
