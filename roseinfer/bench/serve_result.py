"""Result of `bench serve` in the format of `vllm bench serve`: figures, JSON and printed table."""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from roseinfer.bench.open_loop import LoadOutcome
from roseinfer.bench.report import percentile
from roseinfer.bench.serve_config import ResultConfig
from roseinfer.core.config.option import check_writable
from roseinfer.core.errors import ConfigError

TABLE_WIDTH_CHARS = 50
HEADINGS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
ROWS = (
    ("Successful requests:", "completed"),
    ("Failed requests:", "failed"),
    ("Maximum request concurrency:", "max_concurrency"),
    ("Request rate configured (RPS):", "request_rate"),
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)
PROBE_ROWS = (
    ("Probe requests completed:", "probe_completed"),
    ("Probe requests failed:", "probe_failed"),
    ("Median probe E2EL (ms):", "probe_median_e2el_ms"),
    ("P99 probe E2EL (ms):", "probe_p99_e2el_ms"),
    ("Max probe E2EL (ms):", "probe_max_e2el_ms"),
)
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")


def result(outcomes: Sequence[LoadOutcome], report: ResultConfig, probes: Sequence[LoadOutcome] = ()) -> dict[str, Any]:
    """Return the flat object. Times are in seconds unless the name ends in _ms; those of a failed request are 0.

    Rates are over the time from the first request sent to the last end.
    """
    good = [outcome for outcome in outcomes if outcome.ok]
    began_s = min((o.start_s for o in outcomes), default=0.0)
    duration = max((o.end_s for o in outcomes), default=0.0) - began_s
    inputs, outputs = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    num_kept = sum(_is_within(outcome, report.limits()) for outcome in good)
    found = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _rate(len(good), duration),
        "request_goodput": _rate(num_kept, duration) if report.goodput else None,
        "output_throughput": _rate(outputs, duration),
        "total_token_throughput": _rate(inputs + outputs, duration),
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens if o.ok else 0 for o in outcomes],
        "ttfts": [o.ttft_s if o.chunk_s else 0.0 for o in outcomes],
        "itls": [o.itl_s for o in outcomes],
        "latencies": [_latency_s(o) for o in outcomes],
        "start_times": [o.start_s for o in outcomes],
        "queue_times": [o.client_queue_s for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
        "max_output_tokens_per_s": _peak_tokens(good),
        "max_concurrent_requests": _peak_requests(good),
        "rtfx": 0.0,
        **_failures(outcomes),
        **(_probed(probes) if probes else {}),
    }
    samples = _samples(good)
    for name in report.metrics():
        found |= _statistics(name, samples[name], report.percentiles())
    return found


def _samples(good: Sequence[LoadOutcome]) -> dict[str, list[float]]:
    """Return seconds by the names of `HEADINGS`."""
    answered = [outcome for outcome in good if outcome.chunk_s]
    return {
        "ttft": [o.ttft_s for o in answered],
        "tpot": [o.tpot_s for o in answered if o.output_tokens > 1],
        "itl": [gap for o in answered for gap in o.itl_s],
        "e2el": [o.latency_s for o in answered],
        "client_queue_time": [o.client_queue_s for o in good],
        "e2el_including_client_queue": [o.latency_s + o.client_queue_s for o in answered],
    }


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return statistics in ms; all are 0 without values."""
    values = [1e3 * value for value in seconds] or [0.0]
    found = {f"mean_{name}_ms": fmean(values), f"median_{name}_ms": median(values), f"std_{name}_ms": pstdev(values)}
    return found | {f"p{_short(p)}_{name}_ms": percentile(values, p) for p in percentiles}


def _is_within(outcome: LoadOutcome, limits: Mapping[str, float]) -> bool:
    """True if a request that ended well is within all limits (ms)."""
    if not outcome.chunk_s:
        return False
    tpot_s = outcome.tpot_s if outcome.output_tokens > 1 else 0.0
    seen = {"ttft": outcome.ttft_s, "tpot": tpot_s, "e2el": outcome.latency_s}
    return all(1e3 * seen[name] <= limit for name, limit in limits.items())


def _failures(outcomes: Sequence[LoadOutcome]) -> dict[str, Any]:
    """Count failures: `cut_off` after the answer began, `refused` by status, code and cause."""
    cut = sum(o.status == 200 and not o.ok for o in outcomes)
    refused = Counter(o.refusal for o in outcomes if o.status not in (None, 200))
    return {"cut_off": cut, "refused": dict(refused.most_common())}


def _probed(probes: Sequence[LoadOutcome]) -> dict[str, Any]:
    times = [1e3 * _latency_s(probe) for probe in probes if probe.ok]
    counts = {"probe_completed": len(times), "probe_failed": len(probes) - len(times)}
    if not times:
        return counts
    figures = {"median": median(times), "p99": percentile(times, 99), "max": max(times)}
    return counts | {f"probe_{name}_e2el_ms": value for name, value in figures.items()}


def _latency_s(outcome: LoadOutcome) -> float:
    return outcome.latency_s if outcome.chunk_s else 0.0


def _peak_tokens(good: Sequence[LoadOutcome]) -> float:
    """Return the highest number of tokens read in one second, counted from the first request sent."""
    began_s = min((o.start_s for o in good), default=0.0)
    read: Counter[int] = Counter()
    for outcome in good:
        counted = len(outcome.chunk_tokens) == len(outcome.chunk_s)
        tokens = outcome.chunk_tokens if counted else [1] * len(outcome.chunk_s)
        for at_s, number in zip(outcome.chunk_s, tokens, strict=True):
            read[int(outcome.start_s + at_s - began_s)] += number
    return float(max(read.values(), default=0))


def _peak_requests(good: Sequence[LoadOutcome]) -> int:
    """Return the highest number of concurrent requests; at equal times ends count before starts."""
    changes = [(o.start_s, 1) for o in good] + [(o.start_s + _latency_s(o), -1) for o in good]
    limit = now = 0
    for _, change in sorted(changes):
        now += change
        limit = max(limit, now)
    return limit


def as_table(found: Mapping[str, Any], report: ResultConfig) -> str:
    """Format the result, which includes `max_concurrency` and `request_rate`."""
    lines = [f"{' Serving Benchmark Result ':=^{TABLE_WIDTH_CHARS}}"]
    lines += [_row(label, key, found[key]) for label, key in ROWS if found.get(key) not in (None, "inf")]
    if "probe_completed" in found:
        lines.append(f"{'Probe Requests':-^{TABLE_WIDTH_CHARS}}")
        lines += [_row(label, key, found[key]) for label, key in PROBE_ROWS if key in found]
    for name, (short, heading) in HEADINGS.items():
        if name not in report.metrics():
            continue
        lines.append(f"{heading:-^{TABLE_WIDTH_CHARS}}")
        rows = {"Mean": f"mean_{name}_ms", "Median": f"median_{name}_ms"}
        rows |= {f"P{_short(p)}": f"p{_short(p)}_{name}_ms" for p in report.percentiles()}
        lines += [_row(f"{word} {short} (ms):", key, found[key]) for word, key in rows.items()]
    return "\n".join([*lines, "=" * TABLE_WIDTH_CHARS])


def _row(label: str, key: str, value: float) -> str:
    if isinstance(value, int) and key != "max_concurrent_requests":
        return f"{label:<40} {value:<10}"
    return f"{label:<40} {value:<10.2f}"


def file_name(named: Mapping[str, Any]) -> str:
    """Return the default file name for the result."""
    limit = named["max_concurrency"]
    limit = "" if limit is None else f"-concurrency{limit}"
    rate = f"{named['request_rate']}qps"
    if "ramp_up_strategy" in named:
        ends = f"{named['ramp_up_start_rps']}qps-{named['ramp_up_end_rps']}qps"
        rate = f"ramp-up-{named['ramp_up_strategy']}-{ends}"
    model = str(named["model_id"]).rpartition("/")[2]
    return f"{named['label'] or named['backend']}-{rate}{limit}-{model}-{named['date']}.json"


def prepare_folder(report: ResultConfig) -> None:
    """Make the folder of the result. Raise `ConfigError` if the result cannot be written there."""
    folder = Path(report.result_dir or ".")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"result_dir: cannot make {str(folder)!r}: {error.strerror}") from error
    if report.result_filename:
        check_writable("result_filename", str(folder / report.result_filename))
    elif not os.access(folder, os.W_OK):
        raise ConfigError(f"result_dir: cannot write to {str(folder)!r}")


def save(found: Mapping[str, Any], report: ResultConfig) -> Path:
    """Write the result where `report` says, with details if it asks for them. Raise OSError."""
    path = Path(report.result_dir or ".") / (report.result_filename or file_name(found))
    written = {key: value for key, value in found.items() if report.save_detailed or key not in DETAILS}
    text = json.dumps(written)
    if report.append_result and path.exists() and path.stat().st_size:
        text = f"\n{text}"
    with path.open("a" if report.append_result else "w", encoding="utf-8") as file:
        file.write(text)
    return path


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _short(p: float) -> str:
    return str(int(p)) if math.floor(p) == p else str(p)
