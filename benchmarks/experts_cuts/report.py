"""What `experts_cuts` has found, in tables."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.experts_cuts.results import Line, read_results
from benchmarks.experts_cuts.size import Size
from benchmarks.gpu_table import gpu, torch_versions
from roseinfer.bench.report import host, table

READ_BYTES_S = 4.27e12
FLOPS_S = {"bf16": 711e12, "fp8": 1538e12}
ELEMENT = {"bf16": 2, "fp8": 1}
WHOLE = ("few", "many")
ALONE = ("logits", "route", "order", "spread", "gate_up", "down", "add")


def floor_us(line: Line, size: Size) -> float:
    """The least time of a layer that reads so many experts."""
    kind = line["kind"]
    reading = size.weight_bytes(line["experts"], ELEMENT[kind]) / READ_BYTES_S
    return max(reading, size.flops(line["tokens"]) / FLOPS_S[kind]) * 1e6


def whole_rows(lines: Sequence[Line], size: Size) -> list[Line]:
    """Of each kind and number of tokens the layer by the default, by the best, and the bound."""
    rows = []
    for part, kind, tokens in sorted({(line["part"], line["kind"], line["tokens"]) for line in lines}):
        ours = [line for line in lines if (line["part"], line["kind"], line["tokens"]) == (part, kind, tokens)]
        if part not in WHOLE:
            continue
        best, own = min(ours, key=_us), [line for line in ours if line.get("default")]
        us, floor = best["us"], floor_us(best, size)
        rows.append(
            {
                "path": part,
                "kind": kind,
                "tokens": tokens,
                "experts": best["experts"],
                "default us": own[0]["us"] if own else None,
                "again us": own[1]["us"] if len(own) > 1 else None,
                "best us": us,
                "bound us": floor,
                "of bound": floor / us,
                "TB/s": size.weight_bytes(best["experts"], ELEMENT[kind]) / us / 1e6,
                "TFLOP/s": size.flops(tokens) / us / 1e6,
                "best config": best["config"] if best not in own else "the default",
            }
        )
    return rows


def alone_rows(lines: Sequence[Line]) -> list[Line]:
    """us of each launch alone, by the default and by the best cut; of a product also the best of each way."""
    rows = []
    for kind, tokens in sorted({(line["kind"], line["tokens"]) for line in lines}):
        row: Line = {"kind": kind, "tokens": tokens}
        for part in ALONE:
            ours = [line for line in lines if (line["part"], line["kind"], line["tokens"]) == (part, kind, tokens)]
            own = next((line["us"] for line in ours if line.get("default")), None)
            best = min((line["us"] for line in ours), default=None)
            row[part] = None if best is None else f"{'-' if own is None else f'{own:.1f}'} > {best:.1f}"
        rows.append(row)
    return rows


def way_rows(lines: Sequence[Line]) -> list[Line]:
    """The best cut of each product, way, kind and number of tokens."""
    names = ("part", "kind", "tokens", "way")
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line["part"] in ("gate_up", "down", "route"):
            groups.setdefault(tuple(line[name] for name in names), []).append(line)
    best = [min(group, key=_us) for _, group in sorted(groups.items())]
    return [{name: line[name] for name in (*names, "us", "config")} for line in best]


def border_rows(rows: Sequence[Line]) -> list[Line]:
    """Where `experts_few` and tiles both run: which is faster, as they are and at best."""
    found = {(row["path"], row["kind"], row["tokens"]): row for row in rows}
    both = sorted((kind, tokens) for path, kind, tokens in found if path == "few" and ("many", kind, tokens) in found)
    result = []
    for kind, tokens in both:
        few, many = found["few", kind, tokens], found["many", kind, tokens]
        row = {"kind": kind, "tokens": tokens}
        for name in ("default us", "best us"):
            row |= {f"few {name}": few[name], f"many {name}": many[name]}
        result.append(row | {"faster": "few" if few["best us"] < many["best us"] else "many"})
    return result


def _us(line: Line) -> float:
    return float(line["us"])


def report(out: Path, size: Size) -> int:
    """Print what came of it, and write it beside the results. Returns 1 if some kernel failed or was wrong."""
    lines = read_results(out)
    good, failed = [line for line in lines if "us" in line], [line for line in lines if "failed" in line]
    whole = whole_rows(good, size)
    tables = {"ways": way_rows(good), "alone": alone_rows(good), "whole": whole, "border": border_rows(whole)}
    for name, rows in tables.items():
        print(f"\n{name}\n{table(rows)}")
    reasons = Counter((line["part"], line["kind"], line["failed"].split(":")[0]) for line in failed)
    print(f"\n{len(good)} results, {len(failed)} failed: {dict(reasons)}", flush=True)
    machine: Line = {**gpu(), **host(), **torch_versions()}
    told: Line = {**tables, "failed": failed, "machine": machine}
    (out / "summary.json").write_text(json.dumps(told, indent=1) + "\n")
    own = [line for line in failed if line["part"] in WHOLE and not line["way"]]
    return 1 if own or not good else 0
