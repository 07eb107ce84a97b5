"""Tables of `roseinfer top`: columns and number formats, independent of how they are drawn."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from roseinfer.cli.terminal.screen import printable

Row = Mapping[str, Any]
UNKNOWN = "-"
COLUMN_GAP_CHARS = 2  # characters between columns
MIN_ELASTIC_CHARS = 24


class Column(NamedTuple):
    """One column. `elastic`: text that is truncated to the remaining width and never dropped."""

    title: str
    write: Callable[[Row], str]
    right: bool = True
    elastic: bool = False


class Sheet(NamedTuple):
    """One table. `missing` is shown instead of an empty one."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    missing: str = ""


def fitting(sheet: Sheet, width: int) -> list[tuple[Column, int]]:
    """Return the columns that fit into `width` characters and their widths: the first ones in full, the elastic one in
    the remaining width.
    """
    elastic = next((column for column in sheet.columns if column.elastic), None)
    left = width - (0 if elastic is None else MIN_ELASTIC_CHARS + COLUMN_GAP_CHARS)
    kept: list[tuple[Column, int]] = []
    for column in sheet.columns:
        if column is elastic:
            continue
        needed = max(map(len, [column.title, *(printable(column.write(row)) for row in sheet.rows)]))
        if needed + COLUMN_GAP_CHARS > left:
            break
        left -= needed + COLUMN_GAP_CHARS
        kept.append((column, needed))
    return kept if elastic is None else [*kept, (elastic, left + MIN_ELASTIC_CHARS)]


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:,.{digits}f}{unit}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def milliseconds(value: float | None) -> str:
    """Format a time with three digits and a unit."""
    if value is None:
        return UNKNOWN
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"


def seen_and_promised(row: Row, name: str) -> str:
    promised = (row.get("objectives") or {}).get(f"{name}_ms")
    seen = milliseconds(row.get(f"{name}_ms"))
    return seen if promised is None else f"{seen} / {milliseconds(promised)}"


def counts(values: Mapping[str, float | None]) -> str:
    """Format counts, most frequent first: `price 3, queue 1`."""
    found = sorted(((value, key) for key, value in values.items() if value), reverse=True)
    return ", ".join(f"{key} {value:,.0f}" for value, key in found)


def _percentile(row: Row, name: str, which: str) -> str:
    return milliseconds((row.get(name) or {}).get(which))


PROMISES = (
    Column("class", lambda row: str(row["class"]), right=False),
    Column("req/s", lambda row: number(row["requests_s"], 1)),
    Column("good/s", lambda row: number(row["goodput_s"], 1)),
    Column("kept now", lambda row: share(row["attainment_lately"])),
    Column("kept", lambda row: share(row["attainment"])),
    Column("requests", lambda row: number(sum(row["outcomes"].values()))),
    Column("otherwise", lambda row: counts({k: v for k, v in row["outcomes"].items() if k != "met"}), right=False),
    Column("rejected because of", lambda row: counts(row["refused_because"]), right=False, elastic=True),
)
ENGINES = (
    Column("engine", lambda row: f"{row['engine']} {row.get('model', '')}".rstrip(), right=False),
    Column("state", lambda row: row["state"] or UNKNOWN, right=False),
    Column("running", lambda row: number(row["running"])),
    Column("waiting", lambda row: number(row["waiting"])),
    Column("KV", lambda row: share(row["kv_usage"])),
    Column("utilisation", lambda row: share(row["utilisation"])),
    Column("tok/s", lambda row: number(row["generation_tok_s"])),
    Column("prompt tok/s", lambda row: number(row["prompt_tok_s"])),
    Column("step p50", lambda row: _percentile(row, "step_ms", "p50")),
    Column("p99", lambda row: _percentile(row, "step_ms", "p99")),
    Column("budget", lambda row: milliseconds(row["budget_ms"])),
    Column("speed", lambda row: number(row["speed_ratio"], 2)),
    Column("deaths", lambda row: number(row["deaths"])),
)
DRAFTS = (
    Column("proposer", lambda row: row["proposer"], right=False),
    Column("drafted/s", lambda row: number(row["drafted_s"], 1)),
    Column("accepted/s", lambda row: number(row["accepted_s"], 1)),
    Column("accepted", lambda row: share(row["accepted_share"])),
    Column("tokens/step", lambda row: number(row["tokens_per_step"], 2)),
    Column(
        "accepted by position",
        lambda row: "  ".join(map(share, row["accepted_by_position"])),
        right=False,
        elastic=True,
    ),
)
REQUESTS = (
    Column("request", lambda row: str(row["id"])[-12:], right=False),
    Column("class", lambda row: row["class"] or UNKNOWN, right=False),
    Column("state", lambda row: row["outcome"] or row["state"] or UNKNOWN, right=False),
    Column("total", lambda row: seen_and_promised(row, "e2e")),
    Column("TTFT", lambda row: seen_and_promised(row, "ttft")),
    Column("TPOT", lambda row: seen_and_promised(row, "tpot")),
    Column("prompt", lambda row: number(row["prompt_tokens"])),
    Column("output", lambda row: number(row["output_tokens"])),
    Column("why", lambda row: row["summary"] or row["verdict"] or "", right=False, elastic=True),
)


def sheets(view: Row) -> list[Sheet]:
    slowest = view["slowest"]
    none = "none yet" if slowest is not None else "not available: GET /v1/requests is missing or requires a key"
    drafts = [Sheet("drafts", DRAFTS, view["drafts"])] if view["drafts"] else []
    return [
        Sheet("promises", PROMISES, view["promises"], "no requests yet, or no objectives"),
        Sheet("engines", ENGINES, view["engines"], "no model yet"),
        *drafts,
        Sheet("slowest requests", REQUESTS, slowest or (), none),
    ]


def machine_lines(view: Row) -> list[str]:
    """Return the lines about all engines together."""
    all_of = view["machine"]
    first = [
        f"{number(all_of['generation_tok_s'])} tok/s",
        f"{number(all_of['prompt_tok_s'])} prompt tok/s",
        f"{number(all_of['requests_s'], 1)} ended/s",
        f"{number(all_of['running'])} running",
        f"{number(all_of['waiting'])} waiting",
        f"KV {share(all_of['kv_usage'])}",
        f"utilisation {share(all_of['utilisation'])}",
        f"prefix hits {share(all_of['prefix_hits'])}",
        f"{number(all_of['preemptions_s'], 1)} preempted/s",
    ]
    names = {"TTFT": "ttft_ms", "between tokens": "between_tokens_ms", "total": "e2e_ms"}
    second = [
        f"{title} p50 {_percentile(all_of, name, 'p50')}, p95 {_percentile(all_of, name, 'p95')}"
        for title, name in names.items()
    ]
    router = view["router"]
    if router is not None:
        placed = f"{number(router['placements_s'], 1)} placed/s"
        second.append(f"router {placed}, {number(router['retries'])} retried, {number(router['resumes'])} resumed")
    return ["  ".join(first), "  ".join(second)]


def headline(url: str, view: Row | None, at_s: float) -> str:
    names = ", ".join(view["models"]) if view is not None else ""
    return "  ".join(
        part for part in ("roseinfer top", names, url, time.strftime("%H:%M:%S", time.localtime(at_s))) if part
    )
