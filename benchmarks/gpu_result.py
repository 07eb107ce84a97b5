"""Results of the GPU table per row, as JSON and compared with the peer, the targets and the card's limits."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.bounds import all_rates, bound
from benchmarks.gpu_rows import FIGURES, Row, gain, reached
from roseinfer.bench.report import table

# Figure -> keys in a client's summary.
IN_SUMMARY = {
    "output_tok_s": ("out_tok_s",),
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "ttft_p99_ms": ("ttft_ms", "p99"),
    "tpot_p50_ms": ("tpot_ms", "p50"),
    "tpot_p99_ms": ("tpot_ms", "p99"),
    "itl_p99_ms": ("itl_ms", "p99"),
}
COUNTS = ("requests", "ok", "failed", "rejected", "short")


def read_summary(summary: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return one run of a row from its client's summary. Raises LookupError for a summary without these figures."""
    figures = {}
    for figure, keys in IN_SUMMARY.items():
        value: Any = summary
        for key in keys:
            value = value[key]
        figures[figure] = value
    counts = {name: summary.get(name, 0) for name in COUNTS}
    return {"seed": seed, "figures": figures, **counts, "errors": summary.get("errors", {})}


def row_bounds(row: Row, seed_shift: int) -> dict[str, dict[str, float]]:
    """Return name of the rates -> figure -> bound."""
    return {rates.name: bound(row, rates, seed_shift) for rates in all_rates(row.model)}


def row_result(
    row: Row, bounds: Mapping[str, Mapping[str, float]], runs: Sequence[Mapping[str, Any]], error: str | None
) -> dict[str, Any]:
    """Return a row of medians of `runs` (see `read_summary`). `error`: why the row, or a run of it, has no figures."""
    figures = {figure: _median([run["figures"][figure] for run in runs]) for figure in FIGURES} if runs else {}
    return {
        "model": row.model,
        "row": row.name,
        "arguments": row.arguments,
        "paced": row.paced,
        "error": error,
        "runs": list(runs),
        "figures": figures,
        "peer": dict(row.peer),
        "gain_over_peer": {name: gain(name, value, row.peer.get(name)) for name, value in figures.items()},
        "target": dict(row.target),
        "reached": {name: reached(name, figures.get(name), target) for name, target in row.target.items()},
        "bound": {name: dict(values) for name, values in bounds.items()},
        "share_of_card": {name: gain(name, value, bounds["card"][name]) for name, value in figures.items()},
    }


def unsound(result: Mapping[str, Any]) -> str | None:
    """Return why the row's figures do not count: a run failed, or requests got fewer tokens than they asked for. None
    if they do.
    """
    if result["error"] is not None:
        return str(result["error"])
    bad = [f"{sum(run[name] for run in result['runs'])} {name}" for name in ("failed", "rejected", "short")]
    bad = [text for text in bad if not text.startswith("0 ")]
    return ", ".join(bad) or None


def figures_table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        shown = {FIGURES[name]: result["figures"].get(name) for name in FIGURES}
        rows.append({"row": f"{result['model']} {result['row']}", **shown, "wrong": unsound(result) or ""})
    return table(rows)


def targets_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per target: gain over the peer, and share of the card's limit."""
    rows = []
    for result in results:
        for name, target in result["target"].items():
            rows.append(
                {
                    "row": f"{result['model']} {result['row']}",
                    "figure": FIGURES[name],
                    "ours": result["figures"].get(name),
                    "target": float(target),
                    "reached": "yes" if result["reached"][name] else "NO",
                    "peer": result["peer"].get(name),
                    "x peer": result["gain_over_peer"].get(name),
                    "card": result["bound"]["card"][name],
                    "kernels": result["bound"].get("kernels", {}).get(name),
                    "of card": result["share_of_card"].get(name),
                }
            )
    return table(rows)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
