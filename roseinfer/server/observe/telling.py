"""A record of a request as JSON: what `/v1/requests`, `usage.slo.why` and the console say of it."""

from typing import Any

from roseinfer.core.outputs import COMPLETE
from roseinfer.core.slo import Cause, Forecast, Rejection, Slo
from roseinfer.server.observe.losses import waits_before_seat
from roseinfer.server.observe.records import RequestRecord
from roseinfer.server.observe.verdict import verdict
from roseinfer.server.request.slo_classes import NO_CLASS


def record_json(record: RequestRecord) -> dict[str, Any]:
    """Times in ms from the request's arrival; null = unknown, or not yet."""
    slo, way = record.slo or Slo(), record.way
    return {
        "object": "request",
        "id": record.id,
        "request_id": record.request_id,
        "api": record.api,
        "model": record.model,
        "state": "live" if record.live else "ended",
        "stream": record.stream,
        "created": record.created_s,
        "class": NO_CLASS if record.slo is None else slo.class_name,
        "objectives": objectives_json(slo),
        "predicted": _predicted(record),
        "seen": _seen(record),
        "outcome": record.outcome,
        "finish": record.finish or None,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "choices": record.choices,
        "engine": (0 if record.choices else None) if way is None else way.engine,
        "routing": None
        if way is None
        else {
            "reason": way.reason,
            "retries": way.retries,
            "placed_again": way.placed_again,
            "resumes": way.resumes,
        },
        "why": why_json(record),
    }


def why_json(record: RequestRecord) -> dict[str, Any]:
    told, found = record.told, verdict(record)
    why = told.why
    return {
        "verdict": found.name,
        "summary": found.summary,
        "waited_ms": {} if why is None else {cause.value: ms(seconds) for cause, seconds in why.waited},
        "preemptions": told.preemptions,
        "chunks": 0 if why is None else why.chunks,
        "steps": 0 if why is None else why.steps,
        "sat_out": 0 if why is None else why.sat_out,
        "refused": None if record.rejection is None else _refused(record.rejection),
        "timeline": timeline(record),
    }


def timeline(record: RequestRecord) -> list[dict[str, Any]]:
    """What it did one after the other, without gaps, of the sample that was worst."""
    told = record.told
    seat_s, waits = waits_before_seat(record)
    phases, at_s = [], 0.0
    for cause, seconds in waits:
        phases.append(_phase("wait", cause, at_s, at_s + seconds))
        at_s += seconds
    if told.first_s is None:
        has_seat = told.scheduled_s is not None
        return [*phases, _phase("prefill", None, seat_s, record.age_s)] if has_seat else phases
    phases.append(_phase("prefill", None, seat_s, told.first_s))
    until_s = record.age_s if record.live and not told.finish else told.last_s
    if until_s is not None and until_s > told.first_s:
        phases.append(_phase("decode", None, told.first_s, until_s))
    return phases


def _phase(phase: str, cause: Cause | None, from_s: float, to_s: float) -> dict[str, Any]:
    return {"phase": phase, "cause": cause, "from_ms": ms(from_s), "to_ms": ms(to_s)}


def _predicted(record: RequestRecord) -> dict[str, float | None]:
    """By the policy when it first looked at the request, or when it refused it."""
    forecast = Forecast() if record.told.why is None else record.told.why.forecast
    ttft_s = forecast.ttft_s if record.rejection is None else record.rejection.predicted_ttft_s
    return {"ttft_ms": ms(ttft_s), "tpot_ms": ms(forecast.tpot_s)}


def _seen(record: RequestRecord) -> dict[str, float | None]:
    """The whole is known of what came to its own end."""
    seen = record.seen
    if seen is None:
        return {"ttft_ms": None, "tpot_ms": None, "e2e_ms": None}
    ended = record.finish in COMPLETE and not (record.live and record.outcome is None)
    return {"ttft_ms": ms(seen.ttft_s), "tpot_ms": ms(seen.tpot_s), "e2e_ms": ms(seen.e2e_s) if ended else None}


def _refused(rejection: Rejection) -> dict[str, Any]:
    return {
        "objective": rejection.reason,
        "cause": rejection.cause,
        "predicted_ttft_ms": ms(rejection.predicted_ttft_s),
        "attainable_ms": ms(rejection.attainable_s),
        "hopeless": rejection.hopeless,
    }


def objectives_json(slo: Slo) -> dict[str, float | None]:
    """In ms; null: none."""
    return {"ttft_ms": ms(slo.ttft_s), "tpot_ms": ms(slo.tpot_s), "e2e_ms": ms(slo.e2e_s)}


def ms(seconds: float | None) -> float | None:
    """Infinite: never, which JSON has no number for."""
    return None if seconds is None or seconds == float("inf") else round(seconds * 1000, 3)
