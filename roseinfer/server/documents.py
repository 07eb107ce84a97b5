"""OpenAPI document: request, answer and errors of each route."""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from roseinfer.server.answer_shapes import ChatCompletion, ErrorBody, TextCompletion
from roseinfer.server.formats.messages import document as message_shapes
from roseinfer.server.formats.messages.request import CountTokensRequest, MessagesRequest
from roseinfer.server.formats.pooling import document as pooling_shapes
from roseinfer.server.formats.pooling.cohere import CohereEmbedRequest
from roseinfer.server.formats.pooling.request import EmbeddingRequest, RerankRequest, ScoreRequest
from roseinfer.server.formats.pooling.scoring import RERANK_PATHS, SCORE_PATHS
from roseinfer.server.formats.responses import document as response_shapes
from roseinfer.server.formats.responses.request import ResponsesRequest
from roseinfer.server.formats.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    VllmLoadAdapterRequest,
    VllmUnloadAdapterRequest,
)
from roseinfer.server.http.request_models import RequestModel, RequestParser

INFERENCE_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 504)
_ERROR_TEXTS = {
    400: "a field is invalid or not supported, or the prompt is too long",
    401: "missing or wrong API key",
    403: "the server has no API key, and Host or Origin is not allowed; see --allowed-hosts, --allowed-origins. Or "
    "LoRA adapters are fixed; see --lora-dir",
    404: "unknown model",
    408: "the body arrived too slowly",
    413: "the body is too large or has too many values",
    415: "the body's content type is not application/json",
    429: "the latency objectives are out of reach, or the engine is at its limit of requests or loads; see Retry-After",
    500: "the engine failed",
    503: "queue full, loading, draining, or unhealthy engine; see Retry-After",
    504: "the request timed out before its first token",
}
_REQUESTS: tuple[type[RequestModel], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    VllmLoadAdapterRequest,
    VllmUnloadAdapterRequest,
    EmbeddingRequest,
    CohereEmbedRequest,
    RerankRequest,
    ScoreRequest,
)
_ERRORS: tuple[type[BaseModel], ...] = (ErrorBody, message_shapes.MessageErrorBody)


@dataclass(frozen=True, slots=True)
class _InferenceDocs:
    """Documentation of an inference route: models of answer and errors, and its stream; None: it has none."""

    answer: type[BaseModel]
    description: str = (
        "The answer; with stream: true, events of chunks, then [DONE]. A failure during the stream is an event with an "
        "error object, after which the connection is closed"
    )
    example: str | None = 'data: {"id":"...","choices":[...]}\n\ndata: [DONE]\n\n'
    error: type[BaseModel] = ErrorBody


_INFERENCE = {
    "/v1/completions": _InferenceDocs(TextCompletion),
    "/v1/chat/completions": _InferenceDocs(ChatCompletion),
    "/v1/responses": _InferenceDocs(
        response_shapes.ResponseObject, response_shapes.DESCRIPTION, response_shapes.EXAMPLE
    ),
    "/v1/messages": _InferenceDocs(
        message_shapes.Message,
        message_shapes.DESCRIPTION,
        message_shapes.EXAMPLE,
        message_shapes.MessageErrorBody,
    ),
    "/v1/embeddings": _InferenceDocs(pooling_shapes.EmbeddingList, "The embeddings", None),
    "/v2/embed": _InferenceDocs(pooling_shapes.CohereEmbedding, "The embeddings", None),
} | {
    path: _InferenceDocs(answer, description, None)
    for paths, answer, description in (
        (RERANK_PATHS, pooling_shapes.Reranking, "The documents by falling score"),
        (SCORE_PATHS, pooling_shapes.ScoreList, "A score for each pair"),
    )
    for path in paths
}


def docs(
    answer: type[BaseModel],
    *errors: int,
    body: type[RequestModel] | None = None,
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Return arguments of `add_api_route`: models of answer and request, and statuses and model of errors.

    401 implies 403, and 413 (a body) implies 415.
    """
    responses: dict[int, dict[str, Any]] = {200: {"model": answer}}
    implied = {403} if 401 in errors else set()
    implied |= {415} if 413 in errors else set()
    # FastAPI would make a validator for each `model` of each route, which takes a third of a server's start.
    content = {"application/json": {"schema": _reference(error)}}
    for status in sorted(implied.union(errors)):
        responses[status] = {"content": content, "description": _ERROR_TEXTS[status]}
    extra: dict[str, Any] = {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
    return {"responses": responses, "openapi_extra": extra}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def inference_docs(path: str, request: type[RequestModel]) -> dict[str, Any]:
    """Return the arguments for a route that answers with JSON or, if it streams, server-sent events."""
    route = _INFERENCE[path]
    described: dict[str, Any] = {"tags": ["inference"]}
    described |= docs(route.answer, *INFERENCE_ERRORS, body=request, error=route.error)
    if route.example is not None:
        events = {"schema": {"type": "string"}, "example": route.example}
        described["responses"][200]["content"] = {"text/event-stream": events}
    described["responses"][200]["description"] = route.description
    return described


def install(app: FastAPI, keyed: bool, parser: RequestParser) -> None:
    """Add request bodies with their bounds, and the API key, to `/openapi.json`."""
    written: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not written:
            written.update(_document(app, keyed, parser))
        return written

    app.openapi = openapi  # type: ignore[method-assign]


def _drop_422(paths: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Remove FastAPI's 422 answers: path parameters here are any string."""
    for operations in paths.values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)


def _document(app: FastAPI, keyed: bool, parser: RequestParser) -> dict[str, Any]:
    described: dict[str, Any] = {"title": app.title, "version": app.version, "description": app.description}
    document = get_openapi(**described, routes=app.routes, servers=app.servers or None)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _drop_422(document["paths"], schemas)
    for model in (*map(parser.model, _REQUESTS), *_ERRORS):
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    if keyed:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
    return document
