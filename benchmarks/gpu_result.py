"""What the GPU table's JSON holds of each row, and how it is shown: beside the peer, the targets and the card."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.bounds import all_rates, bound
from benchmarks.gpu_rows import FIGURES, Row, gain, reached
from roseinfer.bench.report import table

# Figure -> where a client's summary holds it.
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
    """One run of a row, from what its client says. Raises LookupError for a summary without these figures."""
    figures = {}
    for figure, keys in IN_SUMMARY.items():
        value: Any = summary
        for key in keys:
            value = value[key]
        figures[figure] = value
    counts = {name: summary.get(name, 0) for name in COUNTS}
    return {"seed": seed, "figures": figures, **counts, "errors": summary.get("errors", {})}


def row_bounds(row: Row, seed_shift: int) -> dict[str, dict[str, float]]:
    """Name of the rates -> figure -> what they allow."""
    return {rates.name: bound(row, rates, seed_shift) for rates in all_rates(row.model)}


def row_result(
    row: Row, bounds: Mapping[str, Mapping[str, float]], runs: Sequence[Mapping[str, Any]], error: str | None
) -> dict[str, Any]:
    """`runs` as of `read_summary`; figures are their medians. `error`: why the row, or a run of it, has none."""
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
    """Why the row's figures do not count, if so: a run failed, or not every request gave what it was asked for."""
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
    """A line per target. x peer, of card: how many times better than the peer, and what share of the card's limit."""
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
