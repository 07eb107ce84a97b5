"""/v2/embed, also through Cohere's client."""

import base64
from array import array
from typing import Any

import pytest

from roseinfer.server.formats.pooling.document import CohereEmbedding
from tests.server.fake_engine import WIDTH, fake_vector
from tests.server.live import LiveServer

LONG = "hello world " * 50
CONTEXT = 64


def vector(server: LiveServer, text: str) -> list[float]:
    return fake_vector(server.tokenizer.encode(text), WIDTH).tolist()


def post(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v2/embed", {"texts": ["hello"]} | fields)
    assert answer.status_code == 200, answer.text
    CohereEmbedding.model_validate(answer.json())
    return answer.json()


def ids_of(server: LiveServer) -> list[list[int]]:
    return [request.prompt.ids for request in server.engine.requests]


def test_client_gets_all_texts_in_order(server: LiveServer) -> None:
    cohere = pytest.importorskip("cohere")
    texts = [f"hello {i}" for i in range(200)]  # more than the client sends at a time
    client = cohere.ClientV2(api_key="none", base_url=server.url)
    answer = client.embed(model="fake", texts=texts, input_type="search_document", embedding_types=["float"])
    assert answer.embeddings.float_ == [pytest.approx(vector(server, text)) for text in texts]
    with pytest.raises(cohere.errors.BadRequestError):
        client.embed(model="fake", texts=[""], input_type="search_document", embedding_types=["float"])


def test_both_types_are_equal(server: LiveServer) -> None:
    found = post(server, texts=["hello", "world"], embedding_types=["float", "base64"])["embeddings"]
    assert [array("f", numbers).tolist() for numbers in found["float"]] == [
        array("f", base64.b64decode(packed)).tolist() for packed in found["base64"]
    ]


def test_answer_repeats_the_texts_and_counts_tokens(server: LiveServer) -> None:
    answer = post(server, texts=["hello", "world"], unheard_of=1)
    assert answer["texts"] == ["hello", "world"]
    assert answer["meta"]["billed_units"] == {"input_tokens": sum(map(len, ids_of(server)))}
    assert answer["meta"]["warnings"] == ["unheard_of is ignored"]


@pytest.mark.parametrize(
    ("input_type", "before"), [("search_query", "def "), ("search_document", ""), ("clustering", ""), (None, "")]
)
def test_input_type_selects_the_prompt(server: LiveServer, input_type: str | None, before: str) -> None:
    post(server, input_type=input_type)
    assert ids_of(server) == [server.tokenizer.encode(before + "hello")]


@pytest.mark.parametrize("fields", [{}, {"truncate": "END"}, {"truncate": "END", "max_tokens": 9}, {"max_tokens": 999}])
def test_the_end_is_cut(server: LiveServer, fields: dict[str, Any]) -> None:
    post(server, texts=[LONG], **fields)
    assert ids_of(server) == [server.tokenizer.encode(LONG)[: min(fields.get("max_tokens", CONTEXT), CONTEXT)]]


def test_the_start_is_cut(server: LiveServer) -> None:
    post(server, texts=[LONG], truncate="START")
    assert ids_of(server) == [server.tokenizer.encode(LONG, keep_last=CONTEXT)]


def test_output_dimension(server: LiveServer) -> None:
    [numbers] = post(server, output_dimension=3)["embeddings"]["float"]
    assert len(numbers) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": [LONG], "truncate": "NONE"}, "texts"),
        ({"texts": ["x", ""]}, "texts"),
        ({"embedding_types": ["int8"]}, "embedding_types"),
        ({"input_type": "image"}, "input_type"),
        ({"output_dimension": 1}, "output_dimension"),
        ({"truncate": "NONE", "max_tokens": 9}, "max_tokens"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"normalize": False}, "normalize"),
    ],
)
def test_invalid_fields(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post("/v2/embed", {"texts": ["x"]} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
