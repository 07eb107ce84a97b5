"""Figures of a simulated run, of one engine or of several."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, floor
from statistics import fmean
from typing import Any

from roseinfer.core.slo import Cause
from roseinfer.sim.fleet_plan import FleetRun
from roseinfer.sim.simulator import Lifetime, SimulationResult

PERCENTILES = (50, 95, 99)
TENTHS_COUNT = 10


def percentiles(values: Sequence[float], scale: float = 1e3) -> dict[str, float | None]:
    """Return percentiles times `scale`, linear between closest ranks; None for no values."""
    ordered = sorted(values)

    def at(p: int) -> float | None:
        if not ordered:
            return None
        rank = (len(ordered) - 1) * p / 100
        low, high = ordered[floor(rank)], ordered[ceil(rank)]
        return scale * (low + (high - low) * (rank - floor(rank)))

    return {f"p{p}": at(p) for p in PERCENTILES}


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal, 1 / n if one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def adherence(lives: Sequence[Lifetime]) -> float | None:
    """Return the share of good requests among those with objectives, rejected ones included; None without any."""
    promised = [life for life in lives if life.promised]
    return sum(life.good for life in promised) / len(promised) if promised else None


def summarise(run: SimulationResult, replay: SimulationResult | None = None) -> dict[str, Any]:
    """Summarise a run. Goodput is over the time to the last token, and over that of the arrivals (`_window_`).

    Shares, and what is good, are of the requests with objectives; `best_effort` is of those without. `requests`,
    `offered_req_s`, latencies and gaps are of both.

    `replay`: the same arrivals with true lengths known; who is good there and was refused here is falsely rejected.
    """
    lives = run.lifetimes
    promised = [life for life in lives if life.promised]
    served = [life for life in lives if life.served]
    kept = [life for life in promised if life.served]
    good = [life for life in lives if life.good]
    tenants = _by_tenant(lives)
    window_s = max(lives[-1].arrival_s - lives[0].arrival_s, 1e-9)
    summary = {
        "requests": len(lives),
        "promised": len(promised),
        "offered_req_s": len(lives) / window_s,
        "goodput_req_s": run.per_s(len(good)),
        "goodput_window_req_s": len(good) / window_s,
        "adherence": adherence(lives),
        "rejected": 1 - len(kept) / len(promised) if promised else 0.0,
        "refused_by": _rejected_by(promised),
        "waited_s": _waited(lives),
        "false_rejected": _false_rejected(lives, replay),
        "accepted_missed": 1 - len(good) / len(kept) if kept else 0.0,
        "good_tok_s": run.per_s(sum(len(life.token_s) for life in good)),
        "missed": _missed(lives),
        "best_effort": _best_effort([life for life in lives if not life.promised]),
        "classes": _by_class(lives),
        "terciles": _by_length(lives),
        "longest_gap_ms": 1e3 * max((gap for life in served for gap in _gaps(life)), default=0.0),
        "tenants": tenants,
        "fairness": jain(list(tenants.values())),
        "cost_model": _cost_model(run.cost_errors),
        "steps": run.steps,
        "step_ms": 1e3 * run.busy_s / max(1, run.steps),
        "preemptions": run.preemptions,
        "kv_peak": run.kv_peak,
        "from_kv_cache": run.reused[0],
        "from_host_memory": run.reused[1],
        "scheduler_us_per_step": 1e6 * run.policy_s / max(1, run.steps),
    }
    return {**summary, **_latencies(served)}


def mean_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over seeds by key and item; None where a run has none.

    A table that only some runs have, for example that of a small class, is the mean of these runs.
    """
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run.get(name) for run in runs]
        tables = [value for value in values if isinstance(value, Mapping)]
        first = values[0]
        if tables:
            merged[name] = mean_of(tables)
        elif any(value is None for value in values):
            merged[name] = None
        elif isinstance(first, list):
            merged[name] = [fmean(items) for items in zip(*values, strict=False)]
        else:
            merged[name] = fmean(value for value in values if value is not None)
    return merged


def _latencies(served: Sequence[Lifetime]) -> dict[str, Any]:
    return {
        "ttft_ms": percentiles([life.ttft_s for life in served]),
        "tpot_ms": percentiles([life.tpot_s for life in served if life.tpot_s is not None]),
        "itl_ms": percentiles([gap for life in served for gap in _gaps(life)]),
    }


def _gaps(life: Lifetime) -> list[float]:
    return [later - earlier for earlier, later in pairwise(life.token_s)]


def _rejected_by(lives: Sequence[Lifetime]) -> dict[str, int]:
    """Count the rejected requests by cause."""
    found = Counter(life.rejection.cause for life in lives if life.rejection is not None)
    return {cause.value: found[cause] for cause in Cause}


def _waited(lives: Sequence[Lifetime]) -> dict[str, float]:
    """Sum the seconds without a seat by cause."""
    found = dict.fromkeys((cause.value for cause in Cause), 0.0)
    for life in lives:
        for cause, seconds in life.waited:
            found[cause.value] += seconds
    return found


def _false_rejected(lives: Sequence[Lifetime], replay: SimulationResult | None) -> float | None:
    if replay is None:
        return None
    pairs = zip(lives, replay.lifetimes, strict=True)
    return sum(not life.served and other.good for life, other in pairs) / max(1, sum(life.promised for life in lives))


def _best_effort(lives: Sequence[Lifetime]) -> dict[str, Any] | None:
    """Return the share of requests without objectives that finished, and their latencies to the first token."""
    if not lives:
        return None
    served = [life for life in lives if life.served]
    waits = percentiles([life.ttft_s for life in served])
    return {"requests": len(lives), "finished": len(served) / len(lives), "ttft_ms": waits}


def _by_class(lives: Sequence[Lifetime]) -> dict[str, Any]:
    groups: dict[str, list[Lifetime]] = {}
    for life in lives:
        groups.setdefault(life.slo.class_name if life.slo else "", []).append(life)
    found = {}
    for name, group in sorted(groups.items()):
        served = [life for life in group if life.served]
        rejected = 1 - len(served) / len(group)
        found[name] = {"adherence": adherence(group), "rejected": rejected, "missed": _missed(group)}
        found[name] |= {"waited_s": _waited(group), **_latencies(served)}
    return found


def _missed(lives: Sequence[Lifetime]) -> dict[str, float]:
    """Return shares of the requests with objectives that were served late, by objective."""
    late = Counter(name for life in lives for name in life.missed)
    promised = max(1, sum(life.promised for life in lives))
    return {name: late[name] / promised for name in ("ttft", "tpot", "e2e")}


def _by_length(lives: Sequence[Lifetime]) -> dict[str, float | None]:
    """Return adherence of the thirds with short, middle and long outputs."""
    ordered = sorted((life for life in lives if life.promised), key=lambda life: life.output_len)
    cuts = [round(i * len(ordered) / 3) for i in range(4)]
    return {name: adherence(ordered[cuts[i] : cuts[i + 1]]) for i, name in enumerate(("short", "middle", "long"))}


def _by_tenant(lives: Sequence[Lifetime]) -> dict[str, float]:
    """Return adherence of each tenant that has requests with objectives."""
    tenants: dict[str, list[Lifetime]] = {}
    for life in lives:
        if life.promised:
            tenants.setdefault(life.tenant, []).append(life)
    return {name: sum(life.good for life in group) / len(group) for name, group in sorted(tenants.items())}


def _cost_model(errors: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Return mean absolute relative error of predicted step times and the final rho, for the run and by tenths of it.

    Return None if too few steps were predicted.
    """
    if len(errors) < TENTHS_COUNT:
        return None
    cuts = [round(i * len(errors) / TENTHS_COUNT) for i in range(TENTHS_COUNT + 1)]
    tenths = [errors[start:end] for start, end in pairwise(cuts)]
    return {
        "mape": fmean(error for error, _ in errors),
        "rho": errors[-1][1],
        "mape_tenths": [fmean(error for error, _ in part) for part in tenths],
        "rho_tenths": [part[-1][1] for part in tenths],
    }


# --- several engines -------------------------------------------------------------------------------------------------
WINDOW_S = 10.0


def summarise_fleet(run: FleetRun, target: float, replay: SimulationResult | None = None) -> dict[str, Any]:
    """Summarise a run of several engines: as `summarise`, with figures of engines and router under `fleet`.

    `good_retries`: requests that were rejected once and met their objectives elsewhere. `replica_s`: engine seconds,
    start-up included. `below_target_s`: longest period in which arrivals were below `target`, in windows of 10 s; after
    a step in load this is the time until the target is met again.
    """
    lives = run.simulation.lifetimes
    totals = run.engines
    tokens = sum(each.prefix_tokens for each in totals)
    fleet = {
        "engines": {str(number): _engine(run, number) for number in range(len(totals))},
        **run.counts(),
        "good_retries": sum(lives[number].good for number in run.retries),
        "good_resumed": sum(lives[number].good for number in run.resumed),
        "deaths": sum(each.deaths for each in totals),
        "prefix_hit_share": sum(each.prefix_hits for each in totals) / tokens if tokens else 0.0,
        "reasons": dict(run.reasons),
        "replica_s": sum(each.served_s for each in totals),
        "most_engines": max([size for _, size in run.sizes], default=len(totals)),
        "below_target_s": longest_below(lives, target),
        "router_us": 1e6 * run.router_s / max(1, sum(run.reasons.values())),
    }
    return {**summarise(run.simulation, replay), "fleet": fleet}


def _engine(run: FleetRun, number: int) -> dict[str, Any]:
    """Return figures of one engine. `adherence`: of the requests that ended there."""
    each = run.engines[number]
    there = [life for life, engine in zip(run.simulation.lifetimes, run.engine_of, strict=True) if engine == number]
    return {
        "placed": each.placed,
        "share": each.placed / max(1, sum(other.placed for other in run.engines)),
        "adherence": adherence(there),
        "busy_share": each.busy_s / each.served_s if each.served_s else 0.0,
        "prefix_hit_share": each.prefix_hits / each.prefix_tokens if each.prefix_tokens else 0.0,
        "kv_peak": each.kv_peak,
        "steps": each.steps,
        "preemptions": each.preemptions,
        "deaths": each.deaths,
    }


def longest_below(lives: Sequence[Lifetime], target: float) -> float:
    """Return the longest period of arrivals below `target`, in seconds; windows without objectives are skipped."""
    if not lives:
        return 0.0
    windows: dict[int, list[Lifetime]] = {}
    for life in lives:
        windows.setdefault(int((life.arrival_s - lives[0].arrival_s) // WINDOW_S), []).append(life)
    longest = present = 0
    for number in range(max(windows) + 1):
        kept = adherence(windows.get(number, []))
        if kept is not None:
            present = present + 1 if kept < target else 0
            longest = max(longest, present)
    return longest * WINDOW_S


def with_all_reasons(points: Sequence[dict[str, Any]]) -> None:
    """Add missing reasons as 0 to each run, so that means can be taken."""
    tables: list[dict[str, int]] = [point["fleet"]["reasons"] for point in points if "fleet" in point]
    for table in tables:
        for reason in {reason for other in tables for reason in other}:
            table.setdefault(reason, 0)
