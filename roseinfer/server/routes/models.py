"""GET /v1/models and /v1/models/{id}."""

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from roseinfer.core.pooling import PoolingTask
from roseinfer.server.answer_shapes import ModelCard, ModelList
from roseinfer.server.documents import docs
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.request.models import ServedModels


def add(app: FastAPI, models: ServedModels) -> None:
    def card(name: str) -> dict[str, Any]:
        """Return a model with the fields of both OpenAI's and Anthropic's APIs."""
        service, _, adapter = models.find(name)
        info = service.backend.info
        pooling = info.facts.pooling
        embeds = pooling if pooling is not None and pooling.task is PoolingTask.EMBED else None
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "lifecycle": "active",
            "created": service.created,
            "created_at": datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": info.facts.max_model_len,
            "max_tokens": info.facts.max_model_len,
            "owned_by": "roseinfer",
            "root": service.model_name,
            "parent": None if adapter is None else service.served_names[0],
            "max_model_len": info.facts.max_model_len,
            "dtype": info.facts.dtype,
            "weights": info.facts.weights,
            "kv_cache": info.kv_cache,
            "default_sampling": info.facts.default_sampling,
            "task": "generate" if pooling is None else pooling.task.value,
            "embedding_dimensions": None if embeds is None else embeds.width,
        }

    async def list_models() -> Response:
        cards = [card(name) for service in models.loaded() for name in (*service.served_names, *service.adapters())]
        page = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return JsonResponse({"object": "list", "data": cards, **page})

    async def retrieve_model(model_id: str) -> Response:
        return JsonResponse(card(model_id))

    app.add_api_route("/v1/models", list_models, tags=["models"], **docs(ModelList, 401, 503))
    app.add_api_route("/v1/models", list_models, methods=["HEAD"], include_in_schema=False)
    # Ids may contain slashes.
    app.add_api_route("/v1/models/{model_id:path}", retrieve_model, tags=["models"], **docs(ModelCard, 401, 404, 503))
