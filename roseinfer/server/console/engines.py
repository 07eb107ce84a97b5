"""Updates that the owner of the engines contributes to a console. It may serve no requests."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from roseinfer.core.outputs import DraftStats, PolicyStats
from roseinfer.engine.api import EngineReport
from roseinfer.server.console.exchange import EngineUpdates, Position, Updates, answer_queries
from roseinfer.server.console.steps import steps_since
from roseinfer.server.observe.milliseconds import ms
from roseinfer.server.observe.model_names import ModelNames
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.step_metrics import StepMetrics

# A console that missed more gets the newest ones only.
MAX_STEPS_PER_EVENT = 600
# Before so many steps, the costs of an engine are guesses.
MIN_MEASURED_STEPS = 16


def answer_engine_queries(
    peer_queries: PeerQueries, history: StepMetrics, reports: Callable[[], Iterable[EngineReport]], models: ModelNames
) -> None:
    """Answer queries in the process that owns the engines and serves no requests."""
    answer_queries(peer_queries, lambda position: Updates(engine_updates(position, history, reports(), models)))


def engine_updates(
    position: Position, history: StepMetrics, reports: Iterable[EngineReport], models: ModelNames
) -> EngineUpdates:
    return EngineUpdates(engines_json(reports, models), steps_since(history, position.steps, MAX_STEPS_PER_EVENT))


def engines_json(reports: Iterable[EngineReport], models: ModelNames) -> list[dict[str, Any]]:
    """Return the state of each engine, with its model if there are several.

    A dead engine keeps its counters, but nothing runs, waits or is held.
    """
    return [_engine(report, models) for report in reports]


def _engine(report: EngineReport, models: ModelNames) -> dict[str, Any]:
    up, stats = report.state.is_up, report.stats
    policy = (stats.policy if up else None) or PolicyStats()
    return {
        "engine": report.engine,
        **({"model": models.of(report.engine)} if models.several else {}),
        "state": report.state.value,
        "running": stats.running if up else 0,
        "waiting": stats.waiting if up else 0,
        "kv_blocks_used": stats.blocks_used if up else 0,
        "kv_blocks": stats.blocks_total,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "preemptions": stats.preemptions,
        "utilisation": policy.utilisation,
        "speed": policy.speed,
        "margin": policy.margin,
        "budget_ms": ms(policy.step_budget_s),
        **_cost(report),
        "demoted": policy.demoted,
        "restarts": report.restarts,
        "deaths": report.deaths,
        "heartbeat_age_s": round(report.health.heartbeat_age_s, 3),
        "generation_tokens": stats.generation_tokens,
        "prompt_tokens": stats.prompt_tokens,
        **_host_memory(report, up),
        **(_speculation(stats.drafts) if stats.drafts else {}),
    }


def _cost(report: EngineReport) -> dict[str, float | None]:
    """Return what a step of one decoding row takes at present, and a prompt token more. None: unknown.

    `slowdown`: such a step's time divided by the calibrated one, None without a cost file.
    """
    promise, calibrated = report.promise, None if report.info is None else report.info.calibrated
    if promise is None or not promise.cost.is_known or promise.steps < MIN_MEASURED_STEPS:
        return {"step_ms": None, "prompt_token_ms": None, "slowdown": None}
    step_s = promise.constant_s + promise.cost.row_s
    usual_s = 0.0 if calibrated is None else promise._replace(cost=calibrated).constant_s + calibrated.row_s
    return {
        "step_ms": ms(step_s),
        "prompt_token_ms": ms(promise.cost.token_s),
        "slowdown": round(step_s / usual_s, 3) if usual_s > 0 else None,
    }


def _speculation(drafts: Sequence[DraftStats]) -> dict[str, Any]:
    """Return the fields of an engine that has verified drafts. `drafts`: by proposer and position."""
    return {
        "drafted_tokens": sum(sum(each.drafted) for each in drafts),
        "accepted_tokens": sum(sum(each.accepted) for each in drafts),
        "drafts": [each._asdict() for each in drafts],
    }


def _host_memory(report: EngineReport, up: bool) -> dict[str, Any]:
    """Return the fields of an engine with host memory. Bytes are 0 if the size of a block is unknown."""
    offload, block_bytes = report.stats.offload, 0 if report.info is None else report.info.facts.block_bytes
    if offload is None:
        return {}
    return {
        "host_blocks_used": offload.blocks_used if up else 0,
        "host_blocks": offload.blocks_total,
        "host_hits": offload.hits,
        "host_loaded_bytes": offload.loaded * block_bytes,
        "host_stored_bytes": offload.stored * block_bytes,
    }
