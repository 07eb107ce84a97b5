"""Health, readiness, version, load and metrics."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from roseinfer.core.outputs import SchedulerStats
from roseinfer.engine.api import EngineReport
from roseinfer.server.answer_shapes import Health, Load, Version
from roseinfer.server.documents import docs
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.observe.exposition import CONTENT_TYPE
from roseinfer.server.observe.report import Observation
from roseinfer.server.request.models import ServedModels


def add(app: FastAPI, models: ServedModels, observation: Observation) -> None:
    async def health() -> Response:
        error = models.ill_health()
        if error is not None:
            raise error
        return JsonResponse({"status": "ok", **_by_engine(models, _state)})

    async def ready() -> Response:
        error = models.unready()
        if error is not None:
            raise error
        return JsonResponse({"status": "ready", **_by_engine(models, _state)})

    async def version() -> Response:
        return JsonResponse({"version": app.version})

    async def load() -> Response:
        return JsonResponse({"server_load": models.requests(), **_by_engine(models, _load)})

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
    # Monitors ask for the head only.
    probed = {"/health": health, "/ping": health, "/ready": ready, "/version": version, "/metrics": metrics}
    for path, endpoint in probed.items():
        app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)


def _by_engine(models: ServedModels, fields: Callable[[EngineReport], dict[str, Any]]) -> dict[str, Any]:
    """Return fields of each engine if there can be several."""
    engines = [
        {"engine": report.engine, **({"model": service.served_names[0]} if models.several else {}), **fields(report)}
        for service, report in models.engines()
    ]
    return {"engines": engines} if engines else {}


def _state(report: EngineReport) -> dict[str, Any]:
    age_s = round(report.health.heartbeat_age_s, 3)
    return {"state": report.state.value, "heartbeat_age_s": age_s, "restarts": report.restarts}


def _load(report: EngineReport) -> dict[str, Any]:
    """Return the load of an engine; nothing runs on a dead one."""
    stats = report.stats if report.state.is_up else SchedulerStats()
    used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
    return {"running": stats.running, "waiting": stats.waiting, "kv_cache_usage": round(used, 4)}
