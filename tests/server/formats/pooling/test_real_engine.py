"""The routes in front of an engine with a tiny random Qwen3: results are those of transformers."""

import json
from array import array
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from openai import OpenAI

from roseinfer.core.pooling import PairFormat
from roseinfer.engine.build import build_engine
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.options import make_engine_config
from roseinfer.engine.thread_transport import ThreadTransport
from roseinfer.text.pooling_inputs import PairEncoder
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.sentence_folders import add_modules
from tests.server.live import PATIENCE_S, LiveServer

VOCAB, YES, NO = 400, 390, 391
TEXTS = ["hello", "world", "hello world, def words", "x " * 60, "words of a text"]
OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_kv_blocks": 400,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "threads": 1,
}


class ModelServer(LiveServer):
    """A server around an engine with the model of a folder."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, **options: Any) -> None:
        super().__init__(tokenizer)
        self._engine_config = make_engine_config(model=str(folder), **OPTIONS, **options)
        self._model_folder = folder

    async def _start_engine(self) -> Any:
        build = ThreadTransport(lambda: build_engine(self._engine_config, self._model_folder))
        return await AsyncEngine.start(build, self.tokenizer)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model, and its folder."""
    model = make_reference("qwen3", vocab_size=VOCAB)
    folder = save_reference(model, tmp_path_factory.mktemp("qwen3"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8]}))
    return model, folder


@pytest.fixture(scope="module")
def embedder(
    tokenizer: Tokenizer, checkpoint: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    folder = tmp_path_factory.mktemp("embedder") / "qwen3-embedding"
    folder.symlink_to(checkpoint[1])
    with ModelServer(tokenizer, add_modules(folder, {"pooling_mode": "lasttoken"})) as server:
        yield server


def test_embeddings_equal_those_of_transformers(embedder: ModelServer, checkpoint: tuple[Any, Path]) -> None:
    with OpenAI(base_url=embedder.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = client.embeddings.create(model="fake", input=TEXTS * 3)
        short = client.embeddings.create(model="fake", input=TEXTS, dimensions=8)
        single = client.embeddings.create(model="fake", input=embedder.tokenizer.encode(TEXTS[2]))
    ids = [embedder.tokenizer.encode(text) for text in TEXTS]
    assert answer.usage.prompt_tokens == 3 * sum(map(len, ids))
    with torch.inference_mode():
        states = [checkpoint[0].model(torch.tensor([each])).last_hidden_state[0, -1] for each in ids]
    for i, entry in enumerate(answer.data):
        expected = F.normalize(states[i % len(TEXTS)], dim=0)
        torch.testing.assert_close(torch.tensor(entry.embedding), expected, atol=1e-5, rtol=1e-4)
    for state, entry in zip(states, short.data, strict=True):
        expected = F.normalize(state[:8], dim=0)
        torch.testing.assert_close(torch.tensor(entry.embedding), expected, atol=1e-5, rtol=1e-4)
    assert single.data[0].embedding == pytest.approx(answer.data[2].embedding, abs=1e-5)


def test_numbers_equal_base64(embedder: ModelServer) -> None:
    numbers, packed = (
        embedder.post("/v1/embeddings", {"input": TEXTS, "encoding_format": form}).json()["data"]
        for form in ("float", "base64")
    )
    decoded = [array("f", b64decode(entry["embedding"])) for entry in packed]
    for one, other in zip(numbers, decoded, strict=True):
        assert one["embedding"] == pytest.approx(other.tolist(), abs=1e-6)


def test_long_inputs_are_rejected_or_cut(embedder: ModelServer) -> None:
    long = "hello world " * 400
    rejected = embedder.post("/v1/embeddings", {"input": ["x", long]})
    assert rejected.status_code == 400 and "input 1 has" in rejected.json()["error"]["message"]
    cut = embedder.post("/v1/embeddings", {"input": ["x", long], "truncate_prompt_tokens": -1})
    assert cut.status_code == 200, cut.text
    context = embedder.get("/v1/models").json()["data"][0]["max_model_len"]
    assert cut.json()["usage"]["prompt_tokens"] == context + len(embedder.tokenizer.encode("x"))


def test_a_shared_start_is_found_in_the_cache(embedder: ModelServer) -> None:
    body = {"input": "def hello world words " * 5, "cache_salt": "a"}
    first, second = (embedder.post("/v1/embeddings", body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] > 0


def test_reranking_equals_transformers(tokenizer: Tokenizer, checkpoint: tuple[Any, Path], tmp_path: Path) -> None:
    model, weights = checkpoint
    folder = tmp_path / "qwen3-reranker"
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        (folder / file).symlink_to(weights / file)
    known = json.loads(tokenizer.backend.to_str())
    known["model"]["vocab"] |= {"yes": YES, "no": NO}
    (folder / "tokenizer.json").write_text(json.dumps(known))
    documents = ["hello", "world words", "def"]
    with ModelServer(tokenizer, folder) as server:
        answer = server.post("/v1/rerank", {"query": "hello", "documents": documents})
        assert answer.status_code == 200, answer.text
        scored = server.post("/score", {"text_1": "hello", "text_2": documents}).json()["data"]
    encoder = PairEncoder(tokenizer, PairFormat.QWEN3_RERANKER)
    expected = []
    for text in documents:
        with torch.inference_mode():
            logits = model(torch.tensor([encoder.encode("hello", text).ids])).logits[0, -1, [YES, NO]]
        expected.append(float(logits.softmax(0)[0]))
    assert [entry["score"] for entry in scored] == pytest.approx(expected, abs=1e-4)
    results = answer.json()["results"]
    assert [entry["index"] for entry in results] == sorted(range(3), key=expected.__getitem__, reverse=True)
