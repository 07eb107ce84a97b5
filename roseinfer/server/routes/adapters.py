"""LoRA adapters at run time: /v1/lora_adapters, and vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import InvalidRequestError
from roseinfer.server.answer_shapes import AdapterCard, AdapterList, DeletedAdapter
from roseinfer.server.documents import docs
from roseinfer.server.formats.schemas import LoadAdapterRequest, VllmLoadAdapterRequest, VllmUnloadAdapterRequest
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.errors import ApiError, adapters_fixed, bad_request
from roseinfer.server.request.lifecycle import Ticket
from roseinfer.server.request.models import ServedModels
from roseinfer.server.request.service import Service

PATH = "/v1/lora_adapters"


def add(app: FastAPI, models: ServedModels) -> None:
    async def list_adapters() -> Response:
        cards = [_card(one, service) for service in models.loaded() for one in service.adapters().values()]
        return JsonResponse({"object": "list", "data": cards})

    async def load_adapter(request: Request) -> Response:
        async with models.preparing(request, LoadAdapterRequest) as (service, _, wanted):
            return JsonResponse(_card(await _put(models, service, wanted.name, wanted.path), service))

    async def delete_adapter(name: str) -> Response:
        await _drop(models, name)
        return JsonResponse({"id": name, "object": "lora_adapter", "deleted": True})

    async def load_as_vllm(request: Request) -> Response:
        model, _, body = await models.read(request.scope, request.receive)
        service = model.service
        with Ticket(service.lifecycle), service.prepare(request.scope):
            wanted = models.parser.parse(VllmLoadAdapterRequest, body)
            if not wanted.load_inplace and wanted.lora_name in service.adapters():
                message = f"LoRA adapter {wanted.lora_name!r} is loaded already: set load_inplace to replace it"
                raise bad_request(message, "lora_name")
            with _fields_of_vllm():
                await _put(models, service, wanted.lora_name, wanted.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter {wanted.lora_name!r} was loaded.")

    async def unload_as_vllm(request: Request) -> Response:
        _, _, body = await models.read(request.scope, request.receive)
        wanted = models.parser.parse(VllmUnloadAdapterRequest, body)
        with _fields_of_vllm():
            await _drop(models, wanted.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter {wanted.lora_name!r} was unloaded.")

    def route(path: str, endpoint: Any, method: str, described: dict[str, Any]) -> None:
        app.add_api_route(path, endpoint, methods=[method], tags=["models"], response_model=None, **described)

    errors = (400, 401, 404, 413, 429, 503)
    route(PATH, list_adapters, "GET", docs(AdapterList, 401, 503))
    route(PATH, load_adapter, "POST", docs(AdapterCard, *errors, body=LoadAdapterRequest))
    route(PATH + "/{name:path}", delete_adapter, "DELETE", docs(DeletedAdapter, 401, 404, 503))
    for path, endpoint, body in (
        ("/v1/load_lora_adapter", load_as_vllm, VllmLoadAdapterRequest),
        ("/v1/unload_lora_adapter", unload_as_vllm, VllmUnloadAdapterRequest),
    ):
        described = docs(AdapterCard, *errors, body=body)
        described["responses"][200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
        route(path, endpoint, "POST", described)


def _card(adapter: Adapter, service: Service) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "object": "lora_adapter",
        "parent": service.served_names[0],
        "digest": adapter.digest,
        "rank": adapter.rank,
        "bytes": adapter.num_bytes,
    }


@contextmanager
def _fields_of_vllm() -> Iterator[None]:
    """Let errors name `lora_name` and `lora_path`, as these fields are called in vLLM's bodies."""
    try:
        yield
    except (ApiError, InvalidRequestError) as error:
        if error.param in ("name", "path"):
            error.param = f"lora_{error.param}"
        raise


async def _put(models: ServedModels, service: Service, name: str, path: str) -> Adapter:
    """Load an adapter. Raise `ApiError` 400 for a name in use, 403 without --lora-dir, and the errors of
    `Engine.put_adapter`.
    """
    _check_change(service)
    if name in models.names:
        raise bad_request(f"the name {name[:100]!r} is a model's", "name")
    if any(name in other.adapters() for other in models.services if other is not service):
        raise bad_request(f"the name {name[:100]!r} is that of another model's adapter", "name")
    return await service.backend.engine.put_adapter(name, path)


async def _drop(models: ServedModels, name: str) -> None:
    """Drop an adapter's name. Raise `ApiError` 404 for an unknown one, 403 without --lora-dir."""
    service = next((one for one in models.loaded() if name in one.adapters()), None)
    if service is None:
        message = f"there is no LoRA adapter {name[:100]!r}"
        raise ApiError(404, message, type="not_found_error", param="name", code="adapter_not_found")
    _check_change(service)
    await service.backend.engine.drop_adapter(name)


def _check_change(service: Service) -> None:
    if not service.backend.engine.info.adapters_change:
        raise adapters_fixed()
