"""View of `roseinfer top` as plain data: promises by class, machine, engines, slowest requests."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from roseinfer.cli.terminal.metrics import Scrape, Window, parse_metrics
from roseinfer.cli.terminal.remote import Remote, RemoteError, UnreachableError

MAX_RECORDS = 200  # number of newest requests searched for the slowest
OUTCOMES_METRIC = "roseinfer:slo_requests_total"
REJECTIONS_METRIC = "roseinfer:slo_rejections_total"
RUNNING_METRIC = "vllm:num_requests_running"
DRAFT_STEPS_METRIC = "roseinfer:spec_steps_total"
DRAFTED_METRIC = "roseinfer:spec_drafted_tokens_total"
ACCEPTED_METRIC = "roseinfer:spec_accepted_tokens_total"
# Newer and older vLLM names of one metric.
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
BETWEEN_TOKENS = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
# Column of an engine's row -> its gauge and factor.
ENGINE_GAUGES = {
    "running": (RUNNING_METRIC, 1.0),
    "waiting": ("vllm:num_requests_waiting", 1.0),
    "utilisation": ("roseinfer:slo_utilisation", 1.0),
    "speed_ratio": ("roseinfer:slo_speed_ratio", 1.0),
    "budget_ms": ("roseinfer:slo_step_budget_seconds", 1000.0),
    "demoted": ("roseinfer:slo_demoted_requests", 1.0),
    "heartbeat_age_s": ("roseinfer:engine_heartbeat_age_seconds", 1.0),
    "restarts": ("roseinfer:engine_restarts_total", 1.0),
    "deaths": ("roseinfer:engine_deaths_total", 1.0),
}

Row = dict[str, Any]


def scrape(remote: Remote) -> Scrape:
    """Read the metrics. Raises what `Remote.text` raises, and `RemoteError` for anything but metrics."""
    return parse_metrics(remote.text("/metrics"), time.monotonic())


def overview(window: Window, records: Sequence[Mapping[str, Any]] | None, slowest: int, now_s: float) -> Row:
    """Build the view. Rates are per second within the window; None means that the server does not report it.

    `records` are request records, None if the server has none; the `slowest` of them are shown. `now_s`: Unix time.
    """
    after = window.after
    return {
        "interval_s": round(window.seconds, 3),
        "models": after.values("model_name", RUNNING_METRIC),
        "promises": [promise(window, name) for name in after.values("slo_class", OUTCOMES_METRIC)],
        "machine": machine(window),
        "engines": [engine(window, name) for name in after.values("engine", RUNNING_METRIC)],
        "drafts": [drafts(window, name) for name in after.values("proposer", DRAFT_STEPS_METRIC)],
        "router": router(window),
        "slowest": None if records is None else slowest_of(records, slowest, now_s),
    }


def promise(window: Window, name: str) -> Row:
    """Return a class's number of requests and kept promises, since the start and within the window."""
    outcomes = window.after.values("outcome", OUTCOMES_METRIC, slo_class=name)
    since_start = {
        outcome: window.after.total(OUTCOMES_METRIC, slo_class=name, outcome=outcome) or 0 for outcome in outcomes
    }
    lately = {outcome: window.increase(OUTCOMES_METRIC, slo_class=name, outcome=outcome) or 0 for outcome in outcomes}
    causes = window.after.values("cause", REJECTIONS_METRIC, slo_class=name)
    return {
        "class": name,
        "requests_s": window.rate(OUTCOMES_METRIC, slo_class=name),
        "goodput_s": window.rate(OUTCOMES_METRIC, slo_class=name, outcome="met") or 0.0,
        "attainment": _share(since_start.get("met", 0), sum(since_start.values())),
        "attainment_lately": _share(lately.get("met", 0), sum(lately.values())),
        "outcomes": since_start,
        "refused_because": {
            cause: window.after.total(REJECTIONS_METRIC, slo_class=name, cause=cause) for cause in causes
        },
    }


def machine(window: Window) -> Row:
    """Return figures over all engines; times are percentiles of the window in ms."""
    after = window.after
    queries = window.increase("vllm:prefix_cache_queries_total")
    return {
        "running": after.total(RUNNING_METRIC),
        "waiting": after.total("vllm:num_requests_waiting"),
        "kv_usage": after.mean(_first(after, KV_USAGE)),
        "utilisation": after.mean("roseinfer:slo_utilisation"),
        "requests_s": window.rate("vllm:request_success_total"),
        "prompt_tok_s": window.rate("vllm:prompt_tokens_total"),
        "generation_tok_s": window.rate("vllm:generation_tokens_total"),
        "preemptions_s": window.rate("vllm:num_preemptions_total"),
        "prefix_hits": _share(window.increase("vllm:prefix_cache_hits_total") or 0, queries or 0),
        "ttft_ms": percentiles(window, "vllm:time_to_first_token_seconds"),
        "between_tokens_ms": percentiles(window, _first(after, BETWEEN_TOKENS, "_bucket")),
        "e2e_ms": percentiles(window, "vllm:e2e_request_latency_seconds"),
        "step_ms": percentiles(window, "roseinfer:step_time_seconds"),
    }


def engine(window: Window, name: str) -> Row:
    after = window.after
    state = [sample.labels.get("state") for sample in after.of("roseinfer:engine_state", engine=name) if sample.value]
    row: Row = {"engine": name, "state": state[0] if state else None}
    if len(after.values("model_name", RUNNING_METRIC)) > 1:
        row["model"] = ", ".join(after.values("model_name", RUNNING_METRIC, engine=name))
    for key, (metric, factor) in ENGINE_GAUGES.items():
        value = after.total(metric, engine=name)
        row[key] = None if value is None else value * factor
    row["kv_usage"] = after.mean(_first(after, KV_USAGE), engine=name)
    row["generation_tok_s"] = window.rate("vllm:generation_tokens_total", engine=name)
    row["prompt_tok_s"] = window.rate("vllm:prompt_tokens_total", engine=name)
    row["step_ms"] = percentiles(window, "roseinfer:step_time_seconds", engine=name)
    return row


def drafts(window: Window, proposer: str) -> Row:
    """Return what became of a proposer's drafts within the window, and by position since the start."""
    by = {"proposer": proposer}
    steps, drafted, accepted = (
        window.increase(name, **by) or 0 for name in (DRAFT_STEPS_METRIC, DRAFTED_METRIC, ACCEPTED_METRIC)
    )
    totals = [
        (
            window.after.total(ACCEPTED_METRIC, position=at, **by) or 0,
            window.after.total(DRAFTED_METRIC, position=at, **by),
        )
        for at in window.after.values("position", DRAFTED_METRIC, **by)
    ]
    return {
        "proposer": proposer,
        "drafted_s": window.rate(DRAFTED_METRIC, **by),
        "accepted_s": window.rate(ACCEPTED_METRIC, **by),
        "accepted_share": _share(accepted, drafted),
        "tokens_per_step": None if not steps else (accepted + steps) / steps,
        "accepted_by_position": [_share(accepted, drafted or 0) for accepted, drafted in totals],
    }


def router(window: Window) -> Row | None:
    """Return what routing did to requests since the start; None if nothing is routed."""
    placed = window.after.total("roseinfer:router_placements_total")
    if placed is None:
        return None
    names = ("retries", "placed_again", "resumes")
    counts = {name: window.after.total(f"roseinfer:router_{name}_total") or 0 for name in names}
    return {"placements_s": window.rate("roseinfer:router_placements_total"), "placements": placed, **counts}


def percentiles(window: Window, name: str, **labels: str) -> Row | None:
    """Return percentiles in milliseconds; None without samples."""
    found = {f"p{share}": window.quantile(share / 100, name, **labels) for share in (50, 95, 99)}
    return {key: round(value * 1000, 3) for key, value in found.items() if value is not None} or None


def records_of(remote: Remote) -> list[Row] | None:
    """Return the newest request records; None if the server has none or requires another API key.

    Raises `UnreachableError`.
    """
    try:
        answer = remote.json(f"/v1/requests?limit={MAX_RECORDS}")
    except UnreachableError:
        raise
    except RemoteError:
        return None
    data = answer.get("data") if isinstance(answer, dict) else None
    return [record for record in data if isinstance(record, dict)] if isinstance(data, list) else None


def slowest_of(records: Sequence[Mapping[str, Any]], count: int, now_s: float) -> list[Row]:
    """Return the requests that took longest so far, each described in one line."""
    rows = [_request(record, now_s) for record in records]
    rows.sort(key=lambda row: -(row["e2e_ms"] or 0.0))
    return rows[:count]


def _request(record: Mapping[str, Any], now_s: float) -> Row:
    seen, why = record.get("seen") or {}, record.get("why") or {}
    elapsed_ms = seen.get("e2e_ms")
    if elapsed_ms is None and record.get("state") == "live" and record.get("created") is not None:
        elapsed_ms = max(0.0, (now_s - record["created"]) * 1000)
    return {
        "id": record.get("id") or record.get("request_id"),
        "class": record.get("class"),
        "state": record.get("state"),
        "outcome": record.get("outcome") or record.get("finish"),
        "objectives": record.get("objectives") or {},
        "ttft_ms": seen.get("ttft_ms"),
        "tpot_ms": seen.get("tpot_ms"),
        "e2e_ms": elapsed_ms,
        "prompt_tokens": record.get("prompt_tokens"),
        "output_tokens": record.get("output_tokens"),
        "engine": record.get("engine"),
        "verdict": why.get("verdict"),
        "summary": why.get("summary"),
    }


def _first(scrape: Scrape, names: Sequence[str], suffix: str = "") -> str:
    return next((name for name in names if name + suffix in scrape.samples), names[0])


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
