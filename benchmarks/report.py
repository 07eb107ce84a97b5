"""Write the docs page of the GPU table's JSON, with plots.

    python -m benchmarks.report benchmarks/results/gpu-h200.json ... [--classes JSON ...] [--out docs/research]

Of a row that several files have, that of the last file counts. `--classes`: what `benchmarks/slo_gpu.py`
found under classes of latency objectives. Writes OUT/gpu.md, OUT/img/gpu-peer.png and OUT/img/gpu-card.png. What is
known of a row that misses its target is read from files of the JSONs' names that end in .notes.toml, where they are:

    ["qwen3-8b nano"]
    bound = "cuBLAS reads the weights at 2.29 TB/s at batch 256"
    profile = '''
    GEMM 61%, attention 30%, ...
    '''
"""

import argparse
import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bounds import FP8_FLOPS_S
from benchmarks.gpu_result import unsound
from benchmarks.gpu_rows import FIGURES, MODELS, ROWS, Model
from benchmarks.slo_gpu import LOADS, MODEL
from benchmarks.slo_gpu import rows as class_rows

Results = Sequence[Mapping[str, Any]]
Notes = Mapping[str, Mapping[str, str]]

PLOTS = {
    "gpu-peer.png": ("gain_over_peer", "times better than vLLM 0.24.0 (1 = equal)", 1.0),
    "gpu-card.png": ("share_of_card", "share of what the card allows (1 = its limit)", 1.0),
}
INTRO = """\
Written by `benchmarks/report.py` from {json}; `benchmarks/gpu_table.py` measured it.

Models with dummy weights, each behind `roseinfer serve`, greedy, every prompt new but for what a row's prompts share;
the client is `{client}`, in processes of its own on the same machine. The peer's figures, with the same client
arguments on another machine of the kind, are those of {peer}. Compare by ratio, and mind that single runs of either
vary by some percent. [One table at one commit](2026-11-one-table.md) has newer figures, and what got worse.
"""
LIMITS = """\
The limit is a simulated engine without host or network that runs each row's own requests: all running requests decode
in every step, prompts are taken in order of arrival, and a step takes as long as reading its weights or doing its
matrix products (whichever is longer) and then its attention (likewise). "Card" is with the card's measured limits,
4.27 TB/s, 711 TFLOP/s in bf16 and {fp8:,.0f} in products of FP8; "kernels" with what libraries reach on such shapes in
bf16 (`benchmarks/bounds.py`). On the small models the host is the limit long before the card. Where prompts share a
prefix, kernels may read it from the card's cache and be faster than this.
"""


STARTS = """\
## Start
Seconds from the start of the process to the first 200 from `/health`. Kernels are compiled once on a machine: a
server's first start is as a new machine's for what none before it in its setup had compiled.
"""


def page(results: Results, notes: Notes, sources: Sequence[str], classes: Results = ()) -> str:
    """Return the page. `results` of `gpu_table`, read from `sources`; `classes` of `slo_gpu`."""
    results = _newest(results)
    rows = all_rows(results)
    head, last = results[0], results[-1]
    files = " and ".join(f"`{source}`" for source in sources)
    parts = [
        f"# roseinfer on one {head['hardware'].get('gpu', 'GPU')}",
        INTRO.format(json=files, client=" ".join(last["client"]), peer=last["peer"]),
        _setup(results),
        "## Against the targets\nx vLLM: how many times better; of card: share of what the card allows (below).",
        markdown(_targets(rows)),
        *(f"![{caption}](img/{name})" for name, (_, caption, _) in PLOTS.items()),
        "## Every figure\nEach cell is roseinfer's figure, then vLLM's.",
        markdown(_figures(rows)),
        "Where arrivals set the output rate (in brackets) it says nothing of the server.",
        *(_classes(found) for found in classes),
        STARTS,
        markdown(_starts({name: server for result in results for name, server in result["servers"].items()})),
        "## What the card allows",
        LIMITS.format(fp8=FP8_FLOPS_S / 1e12),
        markdown(_bounds(rows)),
        *_misses(rows, notes),
        "## Commands",
        *(_commands(result) for result in results),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _newest(results: Results) -> list[dict[str, Any]]:
    """Remove rows that a later result has, and servers without any remaining row."""
    found: list[dict[str, Any]] = []
    later: set[str] = set()
    for result in reversed(results):
        rows = [row for row in result["rows"] if _key(row) not in later]
        later |= {_key(row) for row in rows}
        models = {row["model"] for row in rows}
        servers = {name: server for name, server in result["servers"].items() if name in models}
        if rows:
            found.insert(0, {**result, "rows": rows, "servers": servers})
    return found


def all_rows(results: Results) -> list[Mapping[str, Any]]:
    """Return all rows in the order of the table."""
    order = [row.key for row in ROWS]
    return sorted((row for result in results for row in result["rows"]), key=lambda row: order.index(_key(row)))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table; the first column is left-aligned, the others right-aligned."""
    if not rows:
        return "(nothing was measured)"
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "| --- |" + " ---: |" * (len(names) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(row[name]) for name in names)} |" for row in rows)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def number(value: float) -> str:
    """Format with three digits, more for large numbers."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['model']} {row['row']}"


def _setup(results: Results) -> str:
    """Describe the machine of each result in one line."""
    machines = dict.fromkeys(_machine(result) for result in results)
    numbers = {machine: number for number, machine in enumerate(machines, 1)}
    lines = []
    for result in results:
        runs = "one run of each row" if result["repeat"] == 1 else f"medians of {result['repeat']} runs of each row"
        when = f"{result['date']}, seed {result['seed']}, {runs}"
        told = {"rows": _named(result["rows"]), "commit": result["commit"], "measured": when}
        lines.append(told | ({"setup": numbers[_machine(result)]} if len(machines) > 1 else {}))
    setups = [f"{f'Setup {number}' if len(machines) > 1 else 'Setup'}: {text}." for text, number in numbers.items()]
    return "\n\n".join([markdown(lines), *setups])


def _named(rows: Results) -> str:
    """Group rows by model; models with all their rows are named once."""
    models = dict.fromkeys(row["model"] for row in rows)
    return "; ".join(" ".join([name, *(row["row"] for row in rows if row["model"] == name)]) for name in models)


def _machine(result: Mapping[str, Any]) -> str:
    told = [*result["hardware"].items(), *result["versions"].items()]
    return ", ".join(f"{name} {value}" for name, value in told)


def _targets(rows: Results) -> list[dict[str, Any]]:
    return [
        {
            "row": _key(row),
            "figure": FIGURES[name],
            "roseinfer": row["figures"].get(name),
            "target": target,
            "reached": "yes" if row["reached"][name] else "no",
            "vLLM": row["peer"].get(name),
            "x vLLM": row["gain_over_peer"].get(name),
            "card allows": row["bound"]["card"][name],
            "of card": row["share_of_card"].get(name),
        }
        for row in rows
        for name, target in row["target"].items()
    ]


def _figures(rows: Results) -> list[dict[str, Any]]:
    shown = []
    for row in rows:
        cells = {}
        for name, title in FIGURES.items():
            ours = row["figures"].get(name)
            text = f"{_cell(ours)} / {_cell(row['peer'].get(name))}"
            cells[title] = f"({text})" if row["paced"] and name == "output_tok_s" else text
        shown.append({"row": _key(row), **cells, "wrong": unsound(row) or "nothing"})
    return shown


def _classes(found: Mapping[str, Any]) -> str:
    """Return the section about a result of `slo_gpu`."""
    model, load = found.get("model", MODEL), LOADS[found.get("load_name", "six")]
    rows = [{"peer": None, "target": None} | row for row in class_rows(found["points"], load, model)]
    names = [name for name in max(rows, key=len) if name not in ("peer", "target")] if rows else []
    shown = [{name: row[name] for name in (*names, "peer", "target")} for row in rows]
    told = f"{found['load']}, commit {found['commit']}. Goodput: requests a second that kept both of their objectives."
    return f"## Classes of latency objectives: {model}\n{told}\n\n{markdown(shown)}"


def _starts(servers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "model": name,
            "first start": " and ".join(map(number, server["start_s"])) or None,
            "again, kernels compiled": server.get("restart_s"),
            "KV blocks": server.get("kv_blocks"),
        }
        for name, server in servers.items()
    ]


def _bounds(rows: Results) -> list[dict[str, Any]]:
    return [
        {"row": _key(row), "limit": limit, **{title: row["bound"][limit][name] for name, title in FIGURES.items()}}
        for row in rows
        for limit in row["bound"]
    ]


def _misses(rows: Results, notes: Notes) -> Iterator[str]:
    """Return a section for each row that misses a target."""
    missed = [row for row in rows if not all(row["reached"].values()) or unsound(row)]
    if not missed:
        yield "## Rows not reached\nNone."
        return
    yield "## Rows not reached"
    for row in missed:
        yield f"### {_key(row)}\n{_shortfall(row)}"
        known = notes.get(_key(row), {})
        yield f"Bound: {known['bound'].strip()}" if "bound" in known else "The bound has not been named yet."
        yield f"```\n{known['profile'].strip()}\n```" if "profile" in known else "No profile has been recorded yet."


def _shortfall(row: Mapping[str, Any]) -> str:
    wrong = unsound(row)
    lines = [] if wrong is None else [f"- The run was not sound: {wrong}."]
    for name, target in row["target"].items():
        ours = row["figures"].get(name)
        if ours is not None and not row["reached"][name]:
            allowed = f"the card allows {number(row['bound']['card'][name])}"
            if "kernels" in row["bound"]:
                allowed += f", with today's kernels {number(row['bound']['kernels'][name])}"
            lines.append(f"- {FIGURES[name]}: {number(ours)}, target {number(target)}; {allowed}.")
    return "\n".join(lines)


def _commands(result: Mapping[str, Any]) -> str:
    lines = [f"# the whole table\n{result['command']}"]
    for name, server in result["servers"].items():
        lines.append(
            f"\n# {name}: a folder with the config of {_config(MODELS[name])}\n{shlex.join(server['command'])}"
        )
        client = " ".join(result["client"])
        for row in result["rows"]:
            if row["model"] == name:
                lines.append(f"{client} --model {name} {row['arguments']}  # {row['row']}")
    return "```\n" + "\n".join(lines) + "\n```"


def _config(model: Model) -> str:
    return model.hub_id + (", weights said to be in FP8 blocks of 128 x 128" if model.fp8_blocks else "")


def bars(rows: Results, kind: str) -> dict[str, float]:
    """Return label -> value of the figures with targets and of output rates that arrivals do not set."""
    found = {}
    for row in rows:
        for name, title in FIGURES.items():
            value = row[kind].get(name)
            if value is not None and (name in row["target"] or (name == "output_tok_s" and not row["paced"])):
                found[f"{_key(row)}: {title.removesuffix(' ms')}"] = float(value)
    return found


def draw(path: Path, rows: Results, kind: str, caption: str, line: float) -> None:
    """Draw horizontal bars on a logarithmic axis. Needs matplotlib (the `bench` extra)."""
    from matplotlib.figure import Figure

    values = bars(rows, kind)
    figure = Figure(figsize=(9, 1.2 + 0.3 * len(values)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh(list(values), list(values.values()), color="tab:red")
    axes.bar_label(drawn, labels=[f"{value:.2f}" for value in values.values()], padding=3)
    axes.axvline(line, color="black", linewidth=1)
    axes.set(xlabel=caption, xscale="log")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)


def write(sources: Sequence[Path], out: Path, classes: Sequence[Path] = ()) -> None:
    results = [json.loads(source.read_text()) for source in sources]
    notes = dict[str, Mapping[str, str]]()
    for file in (source.with_suffix(".notes.toml") for source in sources):
        notes |= tomllib.loads(file.read_text()) if file.exists() else {}
    (out / "img").mkdir(parents=True, exist_ok=True)
    named = [source.name if source.is_absolute() else str(source) for source in sources]
    (out / "gpu.md").write_text(page(results, notes, named, [json.loads(file.read_text()) for file in classes]))
    rows = all_rows(_newest(results))
    for name, (kind, caption, line) in PLOTS.items():
        draw(out / "img" / name, rows, kind, caption, line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("docs/research"))
    parser.add_argument("--classes", type=Path, nargs="*", default=[], metavar="JSON")
    args = parser.parse_args()
    write(args.json, args.out, args.classes)


if __name__ == "__main__":
    main()
