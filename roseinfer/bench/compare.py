"""Comparison of two results of `bench serve` (saved or by `--json`) or of `vllm bench serve`."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from roseinfer.core.errors import ConfigError

# Figures in the order of the table. More is better, except for times, which end in _ms.
COUNTS = ("completed", "failed", "cut_off", "duration", "total_input_tokens", "total_output_tokens")
RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
PEAKS = ("max_output_tokens_per_s", "max_concurrent_requests")
WORSE_IF_MORE = frozenset({"failed", "cut_off", "duration"})
_TIME = re.compile(r"(?:mean|median|std|p[0-9]+(?:[.][0-9]+)?)_(?P<metric>\w+)_ms")
# Names in the output of `--json` -> names in saved results.
_OWN = {
    "ok": "completed",
    "wall_s": "duration",
    "out_tokens": "total_output_tokens",
    "out_tok_s": "output_throughput",
    "req_s": "request_throughput",
}
_OWN_TIMES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}


def read_figures(path: str) -> dict[str, float]:
    """Return the figures of a result by the names that saved results use; the last result of a file counts.

    Raise `ConfigError` for a file that holds no result.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}") from None
    found = _last_object(path, text)
    summary = found.get("summary")
    figures = _own_figures(summary) if isinstance(summary, dict) else _saved_figures(found)
    if not figures:
        raise ConfigError(f"{path!r} is not a result of bench serve")
    return figures


def _last_object(path: str, text: str) -> dict[str, Any]:
    """Return the object in the whole file or in its last line: results may have been appended."""
    for part in (text, text.rstrip().rpartition("\n")[2]):
        try:
            found = json.loads(part)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    raise ConfigError(f"{path!r} is not a JSON object")


def _saved_figures(found: Mapping[str, Any]) -> dict[str, float]:
    names = (*COUNTS, *RATES, *PEAKS, *(name for name in found if _TIME.fullmatch(name)))
    return {name: float(found[name]) for name in names if _is_number(found.get(name))}


def _own_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    figures = {_OWN[name]: float(value) for name, value in summary.items() if name in _OWN and _is_number(value)}
    failed, rejected = summary.get("failed"), summary.get("rejected")
    if _is_number(failed) and _is_number(rejected):
        figures["failed"] = float(failed + rejected)
    for key, name in _OWN_TIMES.items():
        times = summary.get(key)
        for p, value in times.items() if isinstance(times, dict) else ():
            figure = f"{'median' if p == 'p50' else p}_{name}_ms"
            if _TIME.fullmatch(figure) and _is_number(value):
                figures[figure] = float(value)
    return figures


def _is_number(value: Any) -> TypeGuard[float]:
    """True for a finite number: a file may hold NaN, Infinity or an integer beyond a float's range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each figure that both results have: the change in percent, and whether it is better."""
    order = [*COUNTS, *RATES, *PEAKS]
    times = sorted((name for name in before if name not in order), key=_sort_key)
    return [_row(name, before[name], after[name]) for name in [*order, *times] if name in before and name in after]


def _sort_key(name: str) -> tuple[int, str, float]:
    """Return the sort key of a time: metrics in printing order, then mean, median, percentiles, deviation."""
    match = _TIME.fullmatch(name)
    assert match is not None
    metrics = ("ttft", "tpot", "itl", "e2el")
    kind = name.partition("_")[0]
    positions = {"mean": -2.0, "median": -1.0, "std": 101.0}
    metric = match["metric"]
    return (
        metrics.index(metric) if metric in metrics else len(metrics),
        metric,
        positions[kind] if kind in positions else float(kind[1:]),
    )


def _row(name: str, before: float, after: float) -> dict[str, Any]:
    change = None if before == 0 else 100 * (after - before) / before
    less_is_better = name in WORSE_IF_MORE or name.endswith("_ms")
    judged = name in RATES or less_is_better or name in ("completed", "max_output_tokens_per_s")
    better = after < before if less_is_better else after > before
    verdict = "" if not judged or after == before else "better" if better else "worse"
    shown = "-" if change is None else f"{change:+.1f}%"
    return {"figure": name, "A": before, "B": after, "change": shown, "": verdict}
