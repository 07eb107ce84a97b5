"""Health, readiness, version, load and metrics."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from roseinfer.server.documents import Health, Load, Version, docs
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.observe.exposition import CONTENT_TYPE
from roseinfer.server.observe.report import Observation
from roseinfer.server.request.service import Service


def add(app: FastAPI, service: Service, observation: Observation) -> None:
    async def health() -> Response:
        error = service.ill_health()
        if error is not None:
            raise error
        return JsonResponse({"status": "ok"})

    async def ready() -> Response:
        error = service.refusal()
        if error is not None:
            raise error
        return JsonResponse({"status": "ready"})

    async def version() -> Response:
        return JsonResponse({"version": app.version})

    async def load() -> Response:
        return JsonResponse({"server_load": service.lifecycle.room.all_requests()})

    async def metrics() -> Response:
        return Response(await observation.text(), headers={"Content-Type": CONTENT_TYPE})

    health_docs = docs(Health, 503)
    app.add_api_route("/health", health, tags=["status"], **health_docs)
    app.add_api_route("/ping", health, methods=["GET"], tags=["status"], **health_docs)
    app.add_api_route("/ping", health, methods=["POST"], tags=["status"], operation_id="ping_post", **health_docs)
    app.add_api_route("/ready", ready, tags=["status"], **health_docs)
    app.add_api_route("/version", version, tags=["status"], **docs(Version, 401))
    app.add_api_route("/load", load, tags=["status"], **docs(Load, 401))
    text: dict[str, Any] = {"description": "Prometheus text format 0.0.4", "content": {"text/plain": {}}}
    metrics_docs = docs(Health, 503)
    metrics_docs["responses"][200] = text
    app.add_api_route("/metrics", metrics, tags=["status"], response_class=Response, **metrics_docs)
    app.add_api_route("/metrics", metrics, methods=["HEAD"], include_in_schema=False)
