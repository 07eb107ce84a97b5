"""Figures of an open-loop load, as its clients saw it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from roseinfer.bench import attainment
from roseinfer.bench.attainment import REJECTED
from roseinfer.bench.open_loop import LoadOutcome
from roseinfer.bench.report import percentiles
from roseinfer.bench.slo_classes import LoadClass

PERCENTILES = (50, 90, 95, 99)
MAX_ERRORS = 5
MAX_ERROR_CHARS = 160
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "Latency"}
SHOWN = {**LATENCIES, "sent_late_ms": "Sent late"}


def summarise(outcomes: Sequence[LoadOutcome], classes: Sequence[LoadClass] = ()) -> dict[str, Any]:
    """Return counts, rates and percentiles in milliseconds; a percentile of nothing is None.

    Rates are over the time from the first request sent to the last one ended. Rates and percentiles count the requests
    that ended properly. `short`: of these, how many gave another number of tokens than was asked for. `sent_late_ms`:
    delay of requests after they were due. `slo`: attainment of objectives, with `classes`. `constrained`: figures of
    requests with and without a schema, if some have one. `out_tokens`: of all good requests.
    """
    good = [outcome for outcome in outcomes if outcome.ok]
    rejected = sum(outcome.status in REJECTED for outcome in outcomes)
    wall_s = max(o.end_s for o in outcomes) - min(o.start_s for o in outcomes) if outcomes else 0.0
    summary: dict[str, Any] = {
        "requests": len(outcomes),
        "ok": len(good),
        "rejected": rejected,
        "failed": len(outcomes) - len(good) - rejected,
        "short": sum(outcome.output_tokens != outcome.wanted_tokens for outcome in good),
        "wall_s": wall_s,
        "out_tokens": sum(outcome.output_tokens for outcome in good),
        "out_tok_s": _rate(sum(outcome.output_tokens for outcome in good), wall_s),
        "in_tok_s": _rate(sum(outcome.prompt_tokens for outcome in good), wall_s),
        "req_s": _rate(len(good), wall_s),
    }
    for key, seconds in samples(good).items():
        summary[key] = percentiles(seconds, PERCENTILES, 1e3)
    summary["sent_late_ms"] = percentiles([one.start_s - one.due_s for one in outcomes], PERCENTILES, 1e3)
    if any(outcome.constrained for outcome in outcomes):
        summary["constrained"] = _by_constraint(good)
    if classes:
        summary["slo"] = attainment.attainment(outcomes, classes)
    errors = Counter(_error(outcome) for outcome in outcomes if outcome.error is not None)
    summary["errors"] = dict(errors.most_common(MAX_ERRORS))
    return summary


def _by_constraint(good: Sequence[LoadOutcome]) -> dict[str, Any]:
    """Return counts, tokens and TPOT in ms of the requests with and without a schema."""
    shown = {}
    for name, wanted in (("constrained", True), ("free", False)):
        own = [outcome for outcome in good if outcome.constrained is wanted]
        shown[name] = {
            "requests": len(own),
            "output_tokens": sum(outcome.output_tokens for outcome in own),
            "tpot_ms": percentiles(samples(own)["tpot_ms"], PERCENTILES, 1e3),
        }
    return shown


def _error(outcome: LoadOutcome) -> str:
    if outcome.status in REJECTED and outcome.code:
        return outcome.refusal
    return (outcome.error or "")[:MAX_ERROR_CHARS]


def samples(outcomes: Sequence[LoadOutcome]) -> dict[str, list[float]]:
    """Return seconds by key of `LATENCIES`: a value per request with output; for ITL a value per gap between chunks."""
    answered = [outcome for outcome in outcomes if outcome.chunk_s]
    return {
        "ttft_ms": [outcome.ttft_s for outcome in answered],
        "tpot_ms": [outcome.tpot_s for outcome in answered],
        "itl_ms": [gap for outcome in answered for gap in outcome.itl_s],
        "e2e_ms": [outcome.latency_s for outcome in answered],
    }


def as_text(summary: dict[str, Any]) -> str:
    counts = ", ".join(f"{summary[key]} {key}" for key in ("ok", "rejected", "failed", "short"))
    lines = [
        f"Requests:   {summary['requests']} ({counts}) in {summary['wall_s']:.2f} s",
        f"Throughput: {summary['out_tok_s']:.1f} output tok/s ({summary['out_tokens']} tokens), "
        f"{summary['in_tok_s']:.1f} input tok/s, "
        f"{summary['req_s']:.2f} requests/s",
    ]
    for key, name in SHOWN.items():
        shown = " ".join(f"{p} {_number(value)}" for p, value in summary[key].items())
        lines.append(f"{name + ' ms:':<13} {shown}")
    for name, own in summary.get("constrained", {}).items():
        shown = " ".join(f"{p} {_number(value)}" for p, value in own["tpot_ms"].items())
        lines.append(f"{name}: {own['requests']} requests, {own['output_tokens']} output tokens, TPOT ms: {shown}")
    if "slo" in summary:
        lines.append(attainment.as_text(summary["slo"]))
    lines += [f"{count} times: {error}" for error, count in summary["errors"].items()]
    return "\n".join(lines)


def merged_chunks(outcomes: Sequence[LoadOutcome]) -> str:
    """Return a hint if chunks held several uncounted tokens, so that ITL is of chunks, else ""."""
    good = [outcome for outcome in outcomes if outcome.ok and not outcome.chunk_tokens]
    tokens, chunks = sum(o.output_tokens for o in good), sum(len(o.chunk_s) for o in good)
    if tokens <= chunks:
        return ""
    return f"Chunks:     {tokens / chunks:.2f} tokens each, so ITL is per chunk; use --token-itl for ITL per token\n"


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
