"""Routes for gateways: GET /v1/loads (load of the engines) and /v1/promise (attainable objectives)."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from roseinfer.cluster.forecast import RequestForecast, forecasts
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.slo import Slo
from roseinfer.engine.api import EngineInfo, EngineReport
from roseinfer.integrations.orca import utilisation
from roseinfer.server.answer_shapes import EngineLoads, PromiseAnswer
from roseinfer.server.documents import docs
from roseinfer.server.formats.objectives import positive
from roseinfer.server.http.body import JsonResponse
from roseinfer.server.http.errors import bad_request
from roseinfer.server.observe.milliseconds import ms
from roseinfer.server.request.models import ServedModels
from roseinfer.server.request.service import Service
from roseinfer.server.routes.query import MODEL_PARAMETER, integer, parameter

_SECTIONS = ("core", "all")
_OBJECTIVES = ("ttft_ms", "tpot_ms", "e2e_ms")
_COUNTS = ("prompt_tokens", "output_tokens", "n")
_DECIMALS_COUNT = 4


def add(app: FastAPI, models: ServedModels) -> None:
    def load(service: Service, report: EngineReport) -> dict[str, Any]:
        model = service.served_names[0] if models.several else None
        return _load(report, report.info or service.backend.info, model)

    async def loads(request: Request) -> Response:
        asked = _asked(request, ("dp_rank", "include", "format"))
        found = [(service, report) for service in models.loaded() for report in service.backend.engine.reports()]
        chosen = _chosen([report.engine for _, report in found], asked)
        return JsonResponse(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": app.version,
                "dp_rank_count": len(found),
                "loads": [load(service, report) for service, report in found if report.engine in chosen],
            }
        )

    async def promise(request: Request) -> Response:
        asked = _asked(request, (*_COUNTS, *_OBJECTIVES, "model"))
        service = models.find(asked.get("model")).service
        backend = service.backend
        prompt, output, n = (_count(asked, name, backend.info.facts.max_model_len) for name in _COUNTS)
        if prompt is None:
            raise bad_request("prompt_tokens is required: the length of the prompt", "prompt_tokens")
        slo = Slo(_seconds(asked, "ttft_ms"), _seconds(asked, "tpot_ms"), _seconds(asked, "e2e_ms"))
        reports = backend.engine.reports()
        found = forecasts(reports, service.clock.now(), prompt, slo, output_tokens=output or 0, samples=n or 1)
        return JsonResponse(_answer(prompt, found))

    described = docs(EngineLoads, 400, 401, 503)
    described["openapi_extra"] = {"parameters": [parameter("dp_rank", "this engine only", type="integer")]}
    app.add_api_route("/v1/loads", loads, tags=["status"], **described)
    described = docs(PromiseAnswer, 400, 401, 404, 503)
    described["openapi_extra"] = {"parameters": _PROMISE_PARAMETERS}
    app.add_api_route("/v1/promise", promise, tags=["status"], **described)


def _asked(request: Request, known: tuple[str, ...]) -> Mapping[str, str]:
    """Return the query. Raises `ApiError` 400 for unknown or repeated parameters."""
    asked: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise bad_request(
                f"unknown parameter {name[:40]!r} (known: {', '.join(known)})", name[:40], "unsupported_field"
            )
        if name in asked:
            raise bad_request(f"{name} is given twice", name)
        asked[name] = value
    return asked


# --- loads --------------------------------------------------------------------------------------------------------
def _chosen(engines: list[int], asked: Mapping[str, str]) -> list[int]:
    """Return the numbers of the engines that the query asks for. Raises `ApiError` 400."""
    for section in asked.get("include", "all").split(","):
        if section not in _SECTIONS:
            raise bad_request(f"include must be core or all, got {section[:20]!r}", "include", "unsupported_field")
    if asked.get("format", "json") != "json":
        raise bad_request("format must be json: GET /metrics has the others", "format", "unsupported_field")
    if "dp_rank" not in asked:
        return engines
    return [integer("dp_rank", asked["dp_rank"], 0, max(engines, default=0))]


def _load(report: EngineReport, info: EngineInfo, model: str | None) -> dict[str, Any]:
    """Return the load of an engine; nothing runs on a dead one. `model`: its model, None = not shown."""
    stats = report.stats if report.state.is_up else SchedulerStats()
    total = stats.blocks_total or info.facts.num_blocks
    waiting = sum(report.promise.waiting_tokens) if report.promise is not None else None
    per_second = stats.step_rows / stats.step_duration_s if stats.running and stats.step_duration_s else 0.0
    return {
        "dp_rank": report.engine,
        **({} if model is None else {"model": model}),
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_waiting_uncached_tokens": waiting,
        "num_total_reqs": stats.running + stats.waiting,
        "num_used_tokens": stats.blocks_used * info.facts.block_size,
        "max_total_num_tokens": total * info.facts.block_size,
        "token_usage": round(stats.blocks_used / total, _DECIMALS_COUNT) if total else 0.0,
        "gen_throughput": round(per_second, 1),
        "cache_hit_rate": round(stats.prefix_hits / stats.prefix_queries, _DECIMALS_COUNT)
        if stats.prefix_queries
        else 0.0,
        "utilization": round(utilisation(stats, info), _DECIMALS_COUNT),
        "max_running_requests": info.max_num_seqs,
    }


# --- promise ------------------------------------------------------------------------------------------------------
def _count(asked: Mapping[str, str], name: str, most: int) -> int | None:
    return integer(name, asked[name], 1, most) if name in asked else None


def _seconds(asked: Mapping[str, str], name: str) -> float | None:
    return positive(name, asked[name]) / 1000 if name in asked else None


def _answer(prompt_tokens: int, found: list[RequestForecast]) -> dict[str, Any]:
    best = found[0] if found else None
    return {
        "prompt_tokens": prompt_tokens,
        "kept": None if best is None else best.meets_objectives,
        "engine": None if best is None else best.engine,
        "predicted_ttft_ms": None if best is None else ms(best.ttft_s),
        "engines": [
            {
                "engine": one.engine,
                "kept": one.meets_objectives,
                "predicted_ttft_ms": ms(one.ttft_s),
                "utilisation": round(one.utilisation, _DECIMALS_COUNT),
            }
            for one in found
        ],
    }


_PROMISE_PARAMETERS = [
    parameter("prompt_tokens", "length of the prompt, none of it cached", type="integer", required=True),
    parameter("output_tokens", "expected length of the output; default: mean of recent outputs", type="integer"),
    parameter("n", "outputs of the prompt", type="integer"),
    parameter("ttft_ms", "objective: time to first token", type="number"),
    parameter("tpot_ms", "objective: time per output token", type="number"),
    parameter("e2e_ms", "objective: time to the end", type="number"),
    MODEL_PARAMETER,
]
