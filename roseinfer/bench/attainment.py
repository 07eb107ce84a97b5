"""Attainment of a load's objectives, as its clients saw it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from roseinfer.bench.open_loop import LoadOutcome
from roseinfer.bench.report import percentiles, table
from roseinfer.bench.slo_classes import LoadClass

REJECTED = (429, 503)
PERCENTILES = (50, 95, 99)


def missed(outcome: LoadOutcome, limits: LoadClass) -> list[str]:
    """Return the objectives that a completed request missed."""
    seen = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.latency_s}
    most = {"ttft": limits.ttft_s, "tpot": limits.tpot_s, "e2e": limits.e2e_s}
    return [name for name in seen if seen[name] > most[name]]


def completed(outcome: LoadOutcome) -> bool:
    """True if the stream ended properly and had all tokens that were asked for."""
    return outcome.ok and bool(outcome.chunk_s) and outcome.output_tokens >= outcome.wanted_tokens


def good(outcome: LoadOutcome, limits: LoadClass) -> bool:
    """True if the request has objectives and met them all."""
    return limits.has_objectives and completed(outcome) and not missed(outcome, limits)


def attainment(outcomes: Sequence[LoadOutcome], classes: Sequence[LoadClass]) -> dict[str, Any]:
    """Return counts and rates of all requests with objectives, of each class under `classes`, and of best-effort
    requests.

    `best_effort` is None if all requests have objectives. `adherence`: good requests divided by all with objectives.
    `offered_req_s`: arrival rate of all requests. `goodput_req_s`: good requests over the time to the last end (drain).
    `goodput_window_req_s`: over the time in which requests arrived; None if all arrived at once.
    """
    limits = {entry.name: entry for entry in classes}
    number = sum(good(outcome, limits[outcome.class_name]) for outcome in outcomes)
    drain_s = max(o.end_s for o in outcomes) - min(o.start_s for o in outcomes) if outcomes else 0.0
    window_s = outcomes[-1].due_s - outcomes[0].due_s if outcomes else 0.0
    by_class = {name: [o for o in outcomes if o.class_name == name] for name in limits}
    pairs = [(outcome, limits[outcome.class_name]) for outcome in outcomes]
    best_effort = [(outcome, entry) for outcome, entry in pairs if not entry.has_objectives]
    return {
        **_counts([(outcome, entry) for outcome, entry in pairs if entry.has_objectives]),
        "best_effort": {**_counts(best_effort), **_times(best_effort)} if best_effort else None,
        "offered_req_s": len(outcomes) / window_s if window_s else None,
        "goodput_req_s": number / drain_s if drain_s else None,
        "goodput_window_req_s": number / window_s if window_s else None,
        "classes": {name: _of_class(group, limits[name]) for name, group in by_class.items() if group},
    }


def _counts(pairs: Sequence[tuple[LoadOutcome, LoadClass]]) -> dict[str, Any]:
    """Return counts of requests.

    `accepted`: the answer began. `finished`: the answer is complete. `missed` counts a request once for each objective
    that it missed. Without objectives `adherence` is None, and nothing is missed.
    """
    outcomes = [outcome for outcome, _ in pairs]
    kept = sum(good(outcome, limits) for outcome, limits in pairs)
    promised = [(outcome, limits) for outcome, limits in pairs if limits.has_objectives]
    accepted = sum(outcome.status == 200 for outcome in outcomes)
    accepted_missed = sum(outcome.status == 200 and not good(outcome, limits) for outcome, limits in promised)
    late = Counter(name for outcome, limits in pairs if completed(outcome) for name in missed(outcome, limits))
    refused = [outcome for outcome in outcomes if outcome.status in REJECTED]
    return {
        "requests": len(outcomes),
        "finished": sum(map(completed, outcomes)),
        "good": kept,
        "adherence": kept / len(promised) if promised else None,
        "rejected": len(refused),
        "rejected_by_code": dict(Counter(o.refusal for o in refused).most_common()),
        "accepted": accepted,
        "accepted_missed": accepted_missed,
        "accepted_missed_share": accepted_missed / accepted if accepted else None,
        "missed": {name: late[name] for name in ("ttft", "tpot", "e2e")},
        "cut_off": sum(outcome.status == 200 and not completed(outcome) for outcome in outcomes),
        "failed": sum(outcome.status not in (200, *REJECTED) for outcome in outcomes),
    }


def _of_class(outcomes: Sequence[LoadOutcome], limits: LoadClass) -> dict[str, Any]:
    pairs = [(outcome, limits) for outcome in outcomes]
    found = _counts(pairs)
    found["limits_ms"] = {"ttft": 1e3 * limits.ttft_s, "tpot": 1e3 * limits.tpot_s, "e2e": 1e3 * limits.e2e_s}
    found["limits_ms"] = {name: ms for name, ms in found["limits_ms"].items() if ms < float("inf")}
    return {**found, **_times(pairs)}


def _times(pairs: Sequence[tuple[LoadOutcome, LoadClass]]) -> dict[str, Any]:
    """Return percentiles of TTFT and TPOT of completed requests."""
    answered = [outcome for outcome, _ in pairs if completed(outcome)]
    measures = {"ttft_ms": [o.ttft_s for o in answered], "tpot_ms": [o.tpot_s for o in answered]}
    return {key: percentiles(seconds, PERCENTILES, 1e3) for key, seconds in measures.items()}


def as_text(slo: dict[str, Any]) -> str:
    """Format a line of totals and a row per class."""
    rates = [
        f"{name} {value:.2f}"
        for name, value in (
            ("offered", slo["offered_req_s"]),
            ("drain", slo["goodput_req_s"]),
            ("window", slo["goodput_window_req_s"]),
        )
        if value is not None
    ]
    best_effort = slo["best_effort"]
    lines = [f"Goodput:    {', '.join(rates)} requests/s", table([_row(name, c) for name, c in _groups(slo).items()])]
    if best_effort is not None:
        waits = ", ".join(f"{p} {'-' if ms is None else f'{ms:.3f}'}" for p, ms in best_effort["ttft_ms"].items())
        lines.append(f"Best effort: {best_effort['finished']} of {best_effort['requests']} finished, TTFT ms {waits}")
    return "\n".join(lines)


def _groups(slo: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**slo["classes"], "all with objectives": slo}


def _row(name: str, counts: dict[str, Any]) -> dict[str, Any]:
    adherence = counts["adherence"]
    return {
        "class": name,
        **{key: counts.get("limits_ms", {}).get(key.split()[0].lower()) for key in ("TTFT ms", "TPOT ms")},
        "requests": counts["requests"],
        "good": counts["good"],
        "adherence": None if adherence is None else f"{adherence:.3f}",
        "refused": counts["rejected"],
        "missed": counts["accepted_missed"],
        "by TTFT": counts["missed"]["ttft"],
        "by TPOT": counts["missed"]["tpot"],
        "by e2e": counts["missed"]["e2e"],
        "cut off": counts["cut_off"],
        "failed": counts["failed"],
    }
