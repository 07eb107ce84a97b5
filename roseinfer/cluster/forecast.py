"""Forecasts for a request that is not sent yet, and the fullness of engines, from their newest promises."""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from roseinfer.core.slo import Slo
from roseinfer.engine.api import EngineReport, EngineState
from roseinfer.router.base import RoutingRequest
from roseinfer.router.fleet_size import fullness
from roseinfer.router.view import EngineView

NO_SLO = Slo()


class RequestForecast(NamedTuple):
    """Forecast of one engine. `ttft_s`: expected without cached prefix. `utilisation`: of the engine with the request,
    1 = full. `meets_objectives`: True if the objectives would be met; None without any.
    """

    engine: int
    ttft_s: float
    utilisation: float
    meets_objectives: bool | None


def forecasts(
    reports: Iterable[EngineReport],
    now_s: float,
    prompt_tokens: int,
    slo: Slo = NO_SLO,
    *,
    output_tokens: int = 0,
    samples: int = 1,
) -> list[RequestForecast]:
    """Return forecasts of the engines that accept requests and whose policy fits a cost model, best first: engines that
    would meet the objectives, then by time to first token.

    `output_tokens`: expected length; 0 = mean of other requests. `samples`: outputs of the prompt.
    """
    request = RoutingRequest(prompt_tokens, output_tokens=output_tokens, samples=samples)
    if not slo.empty:
        left = [inf if seconds is None else seconds for seconds in (slo.ttft_s, slo.tpot_s, slo.e2e_s)]
        request = request._replace(ttft_left_s=left[0], tpot_s=left[1], end_left_s=left[2])
    found = [forecast for report in reports if (forecast := _forecast(report, request, now_s)) is not None]
    return sorted(found, key=lambda one: (one.meets_objectives is False, one.ttft_s, one.engine))


def fullness_of(report: EngineReport, now_s: float) -> float | None:
    """Return how full an engine is (see `router.fleet_size.fullness`), or None without a promise of it."""
    return None if report.promise is None else fullness(report.promise, now_s)


def _forecast(report: EngineReport, request: RoutingRequest, now_s: float) -> RequestForecast | None:
    promise = report.promise
    if promise is None or promise.draining or report.state is not EngineState.READY:
        return None
    view = EngineView(report.engine, promise.blocks, share=1, delay_s=0.0)
    view.update(promise)
    if not view.priced:
        return None
    outlook = view.forecast(request, now_s, cached_tokens=0)
    meets_objectives = outlook.meets_objectives if request.has_objectives else None
    return RequestForecast(report.engine, outlook.ttft_s, outlook.utilisation, meets_objectives)
