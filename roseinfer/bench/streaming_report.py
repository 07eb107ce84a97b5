"""Report of `bench streaming`: percentiles over the requests of all runs."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from roseinfer.bench.report import percentiles
from roseinfer.bench.streaming import RunRecord, StreamedRequest
from roseinfer.engine.api import EngineInfo

PERCENTILES = (50, 95, 99)
# Key of the report -> its name in print.
LATENCIES = {
    "add_request_ms": "add_request latency",
    "tokenize_ms": "Tokenize",
    "queue_wait_ms": "Queue wait",
    "prefill_ms": "Prefill->first token",
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "itl_ms": "ITL",
    "latency_ms": "Latency",
}


def samples(runs: Sequence[RunRecord]) -> dict[str, list[float]]:
    """Return milliseconds by key of `LATENCIES`: a value per request; for ITL a value per gap between chunks."""
    records = [record for run in runs for record in run.requests]
    values: dict[str, list[float]] = {key: [] for key in LATENCIES}
    for record in records:
        for key, seconds in _seconds(record).items():
            values[key] += [1e3 * value for value in seconds if value is not None]
    return values


def _seconds(record: StreamedRequest) -> dict[str, list[float | None]]:
    return {
        "add_request_ms": [record.add_s],
        "tokenize_ms": [record.tokenize_s],
        "queue_wait_ms": [record.queue_wait_s],
        "prefill_ms": [record.prefill_s],
        "ttft_ms": [record.ttft_s],
        "tpot_ms": [record.tpot_s],
        "itl_ms": [*record.itl_s],
        "latency_ms": [record.latency_s],
    }


def summarise(info: EngineInfo, runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the report as JSON holds it. Counts are over all runs; `submit_wall_s` is the median of the runs.

    Throughput: completion tokens of all runs over the sum of their wall times. A percentile of nothing is None.
    """
    records = [record for run in runs for record in run.requests]
    completion = sum(record.completion_tokens for record in records)
    report: dict[str, Any] = {
        "model": info.model,
        "device": info.facts.device,
        "requests": len(records),
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "completion_tokens": completion,
        "submit_wall_s": median(run.submit_wall_s for run in runs),
    }
    for key, values in samples(runs).items():
        report[key] = percentiles(values, PERCENTILES)
    report["throughput_tok_s"] = completion / sum(run.wall_s for run in runs)
    return report


def as_text(report: Mapping[str, Any]) -> str:
    lines = [
        ("Model", report["model"]),
        ("Device", report["device"]),
        ("Requests", report["requests"]),
        ("Prompt tokens", report["prompt_tokens"]),
        ("Completion tokens", report["completion_tokens"]),
        ("Submit wall", f"{1e3 * report['submit_wall_s']:.3f} ms"),
    ]
    lines += [(name, _percentiles(report[key], " ms")) for key, name in LATENCIES.items()]
    lines.append(("Throughput", f"{report['throughput_tok_s']:.2f} tok/s"))
    return _aligned(lines)


def ratios(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return second / first for each figure; None where a figure is missing or 0."""
    found: dict[str, Any] = {"submit_wall_s": _ratio(first["submit_wall_s"], second["submit_wall_s"])}
    for key in LATENCIES:
        found[key] = {p: _ratio(first[key][p], second[key][p]) for p in first[key]}
    found["throughput_tok_s"] = _ratio(first["throughput_tok_s"], second["throughput_tok_s"])
    return found


def ratios_as_text(ratio: Mapping[str, Any]) -> str:
    lines = [("Submit wall", _number(ratio["submit_wall_s"]))]
    lines += [(name, _percentiles(ratio[key], "")) for key, name in LATENCIES.items()]
    lines.append(("Throughput", _number(ratio["throughput_tok_s"])))
    return _aligned(lines)


def _ratio(first: float | None, second: float | None) -> float | None:
    return second / first if first and second is not None else None


def _percentiles(values: Mapping[str, float | None], unit: str) -> str:
    return " ".join(f"{p} {_number(value)}{unit}" for p, value in values.items())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _aligned(lines: Sequence[tuple[str, Any]]) -> str:
    width = max(len(name) for name, _ in lines) + 1
    return "\n".join(f"{name + ':':<{width}} {value}" for name, value in lines)
