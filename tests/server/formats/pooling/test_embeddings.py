"""/v1/embeddings through the openai client, and the errors of its fields."""

import base64
import json
import math
import operator
import shlex
from array import array
from typing import Any

import openai
import pytest
from openai import OpenAI

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import RequestFailedError
from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import GenerateRequest
from roseinfer.server.formats.pooling.document import EmbeddingList
from roseinfer.server.hosting import greeting
from tests.server.fake_engine import WIDTH, Step, Wait, fake_vector, pooled, rejected, timed_out
from tests.server.live import LiveServer, http_post

PATH = "/v1/embeddings"


def ids_of(server: LiveServer) -> list[list[int]]:
    """The token ids that the engine received."""
    return [request.prompt.ids for request in server.engine.requests]


def post(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"input": "hello"} | fields)
    assert answer.status_code == 200, answer.text
    EmbeddingList.model_validate(answer.json())
    return answer.json()


def error(server: LiveServer, status: int = 400, **fields: Any) -> dict[str, Any]:
    answer = server.post(PATH, {"input": "hello"} | fields)
    assert answer.status_code == status, answer.text
    assert not server.engine.live
    return answer.json()["error"]


def decoded(entry: dict[str, Any]) -> list[float]:
    return array("f", base64.b64decode(entry["embedding"])).tolist()


def test_client_gets_the_vector_by_base64(client: OpenAI, server: LiveServer) -> None:
    answer = client.embeddings.create(model="fake", input="hello world")
    [entry] = answer.data
    ids = server.tokenizer.encode("hello world")
    assert ids_of(server) == [ids]
    assert entry.embedding == fake_vector(ids, WIDTH).tolist()
    assert (entry.index, entry.object, answer.object, answer.model) == (0, "embedding", "list", "fake")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(ids), len(ids))


def test_numbers_equal_base64_to_the_last_bit(server: LiveServer) -> None:
    inputs = ["hello", "hello world", "def"]
    numbers = post(server, input=inputs, encoding_format="float")["data"]
    packed = post(server, input=inputs, encoding_format="base64")["data"]
    assert [array("f", entry["embedding"]).tolist() for entry in numbers] == [decoded(entry) for entry in packed]


def test_order_is_kept_though_the_engine_changes_it(server: LiveServer) -> None:
    def script(request: GenerateRequest) -> list[Step]:
        last = len(server.engine.requests) == 3
        return [server.engine.release, pooled(request)] if last else [Wait(), pooled(request)]

    server.engine.script = script
    inputs = ["hello", "world", "def"]
    data = post(server, input=inputs, encoding_format="float")["data"]
    expected = [fake_vector(server.tokenizer.encode(text), WIDTH) for text in inputs]
    assert [entry["index"] for entry in data] == [0, 1, 2]
    assert [array("f", entry["embedding"]) for entry in data] == expected


@pytest.mark.parametrize("inputs", [[5, 6, 7], [[5, 6, 7], [8]]])
def test_token_ids(client: OpenAI, server: LiveServer, inputs: Any) -> None:
    expected = [inputs] if isinstance(inputs[0], int) else inputs
    answer = client.embeddings.create(model="fake", input=inputs)
    assert ids_of(server) == expected
    assert [entry.embedding for entry in answer.data] == [fake_vector(ids, WIDTH).tolist() for ids in expected]


def test_many_texts_equal_single_ones(server: LiveServer) -> None:
    texts = [f"hello {'world ' * (i % 9)}def {i}" for i in range(300)]
    data = post(server, input=texts, encoding_format="base64")["data"]
    assert ids_of(server) == [server.tokenizer.encode(text) for text in texts]
    assert [entry["index"] for entry in data] == list(range(300))


def test_special_tokens_are_left_out(server: LiveServer) -> None:
    post(server, add_special_tokens=False)
    assert ids_of(server) == [server.tokenizer.encode("hello", add_special_tokens=False)]


def test_prompt_by_name(server: LiveServer) -> None:
    post(server, input=["hello", "x"], prompt_name="query")
    assert ids_of(server) == [server.tokenizer.encode("def hello"), server.tokenizer.encode("def x")]
    message = error(server, prompt_name="x")["message"]
    assert message == "prompt_name: unknown prompt 'x' (known: 'query', 'document')"
    assert error(server, input=[5], prompt_name="query")["param"] == "prompt_name"


def test_messages_become_one_input(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = server.post(PATH, {"messages": messages})
    assert answer.status_code == 200, answer.text
    [ids] = ids_of(server)
    assert server.tokenizer.decode(ids, skip_special_tokens=False) == "<|endoftext|><|user|>hello<|end|>"


@pytest.mark.parametrize("fields", [{"input": None}, {"messages": [{"role": "user", "content": "x"}]}])
def test_input_or_messages(server: LiveServer, fields: dict[str, Any]) -> None:
    assert error(server, **fields)["message"] == "give either input or messages"


# --- dimensions -------------------------------------------------------------------------------------------------------
def test_dimensions_reach_the_engine(client: OpenAI, server: LiveServer) -> None:
    [entry] = client.embeddings.create(model="fake", input="hello", dimensions=3).data
    assert len(entry.embedding) == 3
    [request] = server.engine.requests
    assert request.prompt.pooling is not None and request.prompt.pooling.dimensions == 3


@pytest.mark.parametrize(
    ("dimensions", "limit"), [(WIDTH + 1, str(WIDTH)), (1, f"2 to {WIDTH}"), (0, "greater than or equal to 1")]
)
def test_impossible_dimensions_name_the_limit(server: LiveServer, dimensions: int, limit: str) -> None:
    found = error(server, dimensions=dimensions)
    assert found["param"] == "dimensions" and limit in found["message"]


# --- length -----------------------------------------------------------------------------------------------------------
LONG = "hello world " * 50


def test_too_long_names_the_input(server: LiveServer) -> None:
    found = error(server, input=["x", LONG])
    tokens = len(server.tokenizer.encode(LONG))
    limit = "This model's maximum context length is 64 tokens"
    assert found["message"] == f"{limit}. However, input 1 has {tokens} tokens."
    assert (found["code"], found["param"]) == ("context_length_exceeded", "input")
    assert error(server, input=[[5], [5] * 65])["message"].endswith("However, input 1 has 65 tokens.")
    assert error(server, input=[5] * 65)["message"].endswith("However, input has 65 tokens.")
    assert not server.engine.requests


def test_hopelessly_long_text_is_not_tokenised(server: LiveServer) -> None:
    assert "input 1 has 400000 characters" in error(server, input=["x", "a" * 400_000])["message"]


def test_whole_context_may_be_used(server: LiveServer) -> None:
    post(server, input=[5] * 64)


@pytest.mark.parametrize(("keep", "kept"), [(-1, 64), (10, 10), (1, 1)])
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_truncation(server: LiveServer, keep: int, kept: int, side: str | None) -> None:
    post(server, input=[LONG, "x"], truncate_prompt_tokens=keep, truncation_side=side)
    texts, encode = (LONG, "x"), server.tokenizer.encode
    if side == "left":
        assert ids_of(server) == [encode(text, keep_last=kept) for text in texts]
    else:
        assert ids_of(server) == [encode(text)[:kept] for text in texts]


@pytest.mark.parametrize(("side", "expected"), [("right", [5, 6]), ("left", [7, 8])])
def test_truncation_of_token_ids(server: LiveServer, side: str, expected: list[int]) -> None:
    post(server, input=[5, 6, 7, 8], truncate_prompt_tokens=2, truncation_side=side)
    assert ids_of(server) == [expected]


# --- invalid fields ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("", "input must not be empty"),
        (["x", ""], "input 1 must not be empty"),
        ([], "at least 1 item"),
        ([[5], []], "input.1: List should have at least 1 item"),
        ([[5], [400]], "input 1: token id 400 is not within the vocabulary of 400"),
        (["x", 5], "input.1: Input should be a valid string"),
        (5, "input"),
        ({"text": "x"}, "input"),
    ],
)
def test_invalid_input_names_its_position(server: LiveServer, inputs: Any, message: str) -> None:
    found = error(server, input=inputs)
    assert found["param"] == "input" and message in found["message"]
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("encoding_format", "bytes"), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", 65),
        ("truncation_side", "middle"), ("stream", True), ("use_activation", False), ("normalize", False),
        ("embed_dtype", "float16"), ("endianness", "big"), ("task", "retrieval"), ("input_type", "query"),
        ("output_dimension", 4), ("truncate", True), ("truncate", "END"), ("late_chunking", True),
        ("embedding_types", ["int8"]), ("tpot", 5), ("pred_output_len", 5), ("cache_salt", ""),
        ("chat_template", "x"), ("tools", [{}]),
    ],
)  # fmt: skip
def test_field_that_would_change_the_answer_is_rejected_by_name(server: LiveServer, name: str, value: Any) -> None:
    assert error(server, **{name: value})["param"] == name


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("user", "me", False), ("truncate_prompt_tokens", -1, False), ("embed_dtype", "float32", False),
        ("endianness", "little", False), ("normalize", True, False), ("stream", False, False),
        ("cache_salt", "s", False), ("priority", 1, False), ("request_id", "r", False), ("service_tier", "auto", False),
        ("unheard_of", 1, True), ("service_tier", "flex", True), ("metadata", {"a": 1}, True),
    ],
)  # fmt: skip
def test_other_fields(server: LiveServer, name: str, value: Any, warned: bool) -> None:
    assert post(server, **{name: value}).get("warnings", []) == ([name] if warned else [])


def test_unknown_model(server: LiveServer) -> None:
    assert error(server, 404, model="x")["code"] == "model_not_found"


# --- life of a request ------------------------------------------------------------------------------------------------
def test_terms_reach_the_engine(server: LiveServer) -> None:
    headers = {"x-slo-tpot-ms": "20", "x-tenant-id": "t"}
    body = {"input": ["a", "b"], "slo": {"ttft_ms": 500, "report": True}, "priority": 3, "cache_salt": "s"}
    answer = server.post(PATH, body, headers=headers)
    assert answer.status_code == 200, answer.text
    EmbeddingList.model_validate(answer.json())
    assert answer.json()["usage"]["slo"]["met"]
    for request in server.engine.requests:
        meta = request.prompt.meta
        assert meta.slo is not None and (meta.slo.ttft_s, meta.slo.tpot_s) == (0.5, None)
        assert (meta.priority, meta.cache_salt) == (3, "s")


def test_pace_is_no_objective(server: LiveServer) -> None:
    assert error(server, slo={"tpot_ms": 5})["param"] == "slo.tpot_ms"


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        (RequestFailedError("x"), 500, "request_failed"),
        (rejected(), 429, "slo_unattainable"),
        (timed_out(), 504, "deadline_exceeded"),
    ],
)
def test_one_failed_input_ends_the_others(server: LiveServer, end: Step, status: int, code: str) -> None:
    server.engine.script = lambda request: [end] if len(server.engine.requests) == 2 else [Wait()]
    assert error(server, status, input=["a", "b", "c"])["code"] == code
    assert len(server.engine.cancelled) == 2


def test_disconnect_aborts_all_inputs(server: LiveServer) -> None:
    server.engine.script = lambda request: [Wait()]
    with server.connect() as connection:
        connection.sendall(http_post(PATH, {"input": ["a", "b", "c"]}))
        server.until(lambda: len(server.engine.live) == 3)
    server.until(lambda: len(server.engine.cancelled) == 3)
    server.until(lambda: server.service.lifecycle.room.prompts == 0)


def test_sixteen_inputs_count_as_a_prompt(server: LiveServer) -> None:
    server.engine.script = lambda request: [Wait(), pooled(request)]
    with server.connect() as connection:
        connection.sendall(http_post(PATH, {"input": ["x"] * 33}))
        server.until(lambda: len(server.engine.live) == 33)
        assert server.call(lambda: server.service.lifecycle.room.prompts) == 3
        server.call(server.engine.release)
        assert b" 200 OK" in connection.recv(1000)
    server.until(lambda: server.service.lifecycle.room.prompts == 0)


def test_too_many_inputs(server: LiveServer) -> None:
    limit = server.limits.max_prompts
    assert f"at most {limit} items" in error(server, input=["x"] * (limit + 1))["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_text_is_not_generated(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    found = answer.json()["error"]
    assert (answer.status_code, found["code"], found["param"]) == (400, "unsupported_task", "model")
    assert found["message"] == f"The model 'fake' does not support {path}: it makes embeddings (use /v1/embeddings)"


def test_metrics(server: LiveServer) -> None:
    names = ("requests_total", "inputs_total", "tokens_total", "result_seconds_count")

    def counts() -> list[float]:
        return [server.metric(f"roseinfer:pooling_{name}", api="embeddings") for name in names]

    before, prompts = counts(), server.metric("vllm:prompt_tokens_total")
    post(server, input=[[5, 6], [7]])
    error(server, input=["x", ""])
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [1, 2, 3, 1]
    assert server.metric("vllm:prompt_tokens_total") == prompts + 3


def test_card_names_the_task(server: LiveServer) -> None:
    [card] = server.get("/v1/models").json()["data"]
    assert (card["task"], card["embedding_dimensions"]) == ("embed", WIDTH)


def test_record_and_finish(server: LiveServer) -> None:
    answer = post(server, input=["hello", "world"])
    record = server.get(f"/v1/requests/{answer['id']}").json()
    assert (record["api"], record["finish"], record["choices"], record["output_tokens"]) == (
        "embeddings",
        FinishReason.STOP,
        2,
        0,
    )


def test_client_raises_for_a_bad_input(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="input 1 must not be empty"):
        client.embeddings.create(model="fake", input=["x", ""])


# --- scores of a model that makes embeddings --------------------------------------------------------------------------
def cosine(server: LiveServer, a: str, b: str) -> float:
    first, second = (fake_vector(server.tokenizer.encode(text), WIDTH) for text in (a, b))
    return sum(map(operator.mul, first, second)) / math.hypot(*first) / math.hypot(*second)


def test_scores_are_cosines(server: LiveServer) -> None:
    answer = server.post("/score", {"queries": ["a", "hello"], "documents": ["world", "hello"]})
    assert answer.status_code == 200, answer.text
    scores = [entry["score"] for entry in answer.json()["data"]]
    assert scores == pytest.approx([cosine(server, "a", "world"), 1.0])


def test_reranking_embeds_the_query_once(server: LiveServer) -> None:
    documents = ["world", "hello", "def"]
    answer = server.post("/rerank", {"query": "hello", "documents": documents})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert results[0]["index"] == 1 and results[0]["relevance_score"] == pytest.approx(1.0)
    by_index = sorted(results, key=lambda result: result["index"])
    assert [result["relevance_score"] for result in by_index] == pytest.approx(
        [cosine(server, "hello", text) for text in documents]
    )
    assert ids_of(server) == [server.tokenizer.encode(text) for text in ("hello", *documents)]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"instruction": "x"}, "instruction", "makes embeddings"),
        ({"query": ""}, "query", "query must not be empty"),
        ({"documents": ["x", LONG]}, "documents", "However, documents 1 has "),
    ],
)
def test_texts_that_cannot_be_embedded(server: LiveServer, fields: dict[str, Any], param: str, message: str) -> None:
    answer = server.post("/rerank", {"query": "q", "documents": ["x"]} | fields)
    found = answer.json()["error"]
    assert (answer.status_code, found["param"]) == (400, param) and message in found["message"]


def test_the_first_line_suggests_a_request_that_the_server_accepts(server: LiveServer) -> None:
    words = greeting(ServerConfig(), ["fake"], server.listener, server.info, chats=True)
    _, address, *_, body = shlex.split(words.splitlines()[1])
    assert address == server.url + PATH
    assert server.post(PATH, json.loads(body)).status_code == 200
