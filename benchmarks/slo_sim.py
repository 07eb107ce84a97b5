"""The simulations of docs/research/2026-11-slack-simulated.md.

    python -m benchmarks.slo_sim run --traces DIR [--out DIR] [--only NAME ...]
    python -m benchmarks.slo_sim collect DIR benchmarks/results/slo-sim.json
    python -m benchmarks.slo_sim show benchmarks/results/slo-sim.json [--img docs/research/img]

`run` prints each `roseinfer simulate` command and keeps its JSON (about an hour of one core in all); `collect` keeps
what the page needs of them; `show` prints the page's tables and draws its plots (these need the `bench` extra). DIR of
the traces holds AzureLLMInferenceTrace_code.csv and AzureLLMInferenceTrace_conv.csv from Azure/AzurePublicDataset.
"""

import argparse
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from roseinfer.cli import main as cli
from roseinfer.sim.plot import plot_sweep

BASELINES = ("fifo", "sarathi", "qoserve")
GUARDS = ("scorpio", "scorpio-tuned", "slack", "slack-oracle", "slack-none")
SETUP = "--setup scorpio-8b --seeds 3"
CODE = "--workload trace --trace {traces}/AzureLLMInferenceTrace_code.csv --trace-seconds 1200 --requests 20000"
CONV = (
    "--workload trace --trace {traces}/AzureLLMInferenceTrace_conv.csv --trace-seconds 960 --trace-speed 1.6 "
    "--requests 20000"
)
# Name of the load -> arrivals.
LOADS = {
    "poisson": "--rates 3,5,7,9,11,13,15 --requests 2000",
    "gamma2": "--workload gamma --cv 2 --rates 8 --requests 2000",
    "gamma4": "--workload gamma --cv 4 --rates 8 --requests 2000",
    "code": CODE,
    "conv": CONV,
}
SLOW = "--rates 5,7,9,11,13,15 --requests 2000 --policies scorpio-tuned,slack,slack-none"
COMMANDS = {
    **{f"{name}-base": f"--policies {','.join(BASELINES)} {load}" for name, load in LOADS.items()},
    **{f"{name}-guards": f"--policies {','.join(GUARDS)} --false-rejects {load}" for name, load in LOADS.items()},
    "tenants": "--policies fifo,qoserve,scorpio-tuned,slack --rates 7,11 --requests 2000 --tenant-shares 8,1,1",
    "slow8": f"{SLOW} --slowdown 1.08",
    "slow20": f"{SLOW} --slowdown 1.2",
    "capacity": "--policies fifo,sarathi,qoserve,scorpio,scorpio-tuned,slack --capacity --target 0.99 --requests 2000",
}
TITLES = {
    "poisson": "Poisson",
    "gamma2": "gamma CV 2, 8/s",
    "gamma4": "gamma CV 4, 8/s",
    "code": "Azure code, 20 min",
    "conv": "Azure conv x 1.6, 10 min",
}
POLICIES = (*BASELINES, *GUARDS)
PLOTTED = (*BASELINES, "scorpio", "scorpio-tuned", "slack", "slack-none")
GOODPUT = ("goodput_window_req_s", "goodput_req_s")
LOST = ("rejected", "false_rejected", "accepted_missed")
CLASS_MEMBERS = ("adherence", "rejected", "missed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.add_argument("--traces", required=True)
    command.add_argument("--out", default="slo-sim")
    command.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    command.set_defaults(run=lambda args: run(args.only, args.traces, Path(args.out)))
    command = commands.add_parser("collect")
    command.add_argument("folder")
    command.add_argument("json")
    command.add_argument("--commit", help="of the code that was run")
    command.set_defaults(run=lambda args: collect(Path(args.folder), Path(args.json), args.commit))
    command = commands.add_parser("show")
    command.add_argument("json")
    command.add_argument("--img")
    command.set_defaults(run=lambda args: show(json.loads(Path(args.json).read_text()), args.img))
    args = parser.parse_args()
    args.run(args)


def run(names: Iterable[str], traces: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        flags = f"simulate {SETUP} {COMMANDS[name].format(traces=traces)} --json {out / name}.json"
        print(f"roseinfer {flags}", flush=True)
        if cli.main(shlex.split(flags)):
            raise SystemExit(1)


def collect(folder: Path, target: Path, commit: str | None) -> None:
    """Collect results by the first word of their files' names. Each point of `points` keeps the load's name."""
    points: list[dict[str, Any]] = []
    capacity: list[dict[str, Any]] = []
    for file in sorted(folder.glob("*.json")):
        found, name = json.loads(file.read_text()), file.stem.partition("-")[0]
        capacity += found.get("capacity", [])
        points += [{"load": name, **compact(point, name)} for point in found.get("points", [])]
    points.sort(key=lambda point: (list_index(point["load"]), point["rate"] or 0, POLICIES.index(point["policy"])))
    result = {"simulated": True, "version": version("roseinfer"), "commit": commit}
    result["date"] = datetime.now(UTC).date().isoformat()
    lines = ",\n".join(json.dumps(rounded(point), separators=(",", ":")) for point in points)
    head = json.dumps({**result, "capacity": rounded(capacity)}, separators=(",", ":"))
    target.write_text(f'{head[:-1]},"points":[\n{lines}\n]}}\n')


def list_index(load: str) -> int:
    return [*LOADS, "slow8", "slow20", "tenants"].index(load)


def compact(point: Mapping[str, Any], load: str) -> dict[str, Any]:
    kept = dict(point)
    if load in LOADS:
        kept["classes"] = {
            name: {
                **{member: entry[member] for member in CLASS_MEMBERS},
                "ttft_ms_p95": entry["ttft_ms"]["p95"],
                "tpot_ms_p95": entry["tpot_ms"]["p95"],
            }
            for name, entry in point["classes"].items()
        }
    else:
        del kept["classes"]
    return kept


def rounded(value: Any) -> Any:
    """Round floats to 5 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {name: rounded(member) for name, member in value.items()}
    if isinstance(value, list):
        return [rounded(member) for member in value]
    return value


class Results:
    """Points by load, rate and policy."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.points = result["points"]
        self.capacity = {entry["policy"]: entry for entry in result["capacity"]}

    def loads(self) -> list[tuple[str, float | None]]:
        return list(dict.fromkeys((point["load"], point["rate"]) for point in self.points if point["load"] in LOADS))

    def rates(self, load: str) -> list[float]:
        return sorted({point["rate"] for point in self.points if point["load"] == load})

    def at(self, load: str, rate: float | None, policy: str) -> Mapping[str, Any] | None:
        keys = ("load", "rate", "policy")
        return next((point for point in self.points if tuple(point[k] for k in keys) == (load, rate, policy)), None)

    def value(self, load: str, rate: float | None, policy: str, member: str) -> float | None:
        point = self.at(load, rate, policy)
        return None if point is None else point[member]


def show(result: Mapping[str, Any], img: str | None) -> None:
    found = Results(result)
    own = [policy for policy in GUARDS if policy != "slack-oracle"]
    print("### Adherence\n" + by_load(found, ("adherence",)))
    print("\n### Goodput: over the arrivals / to the last token\n" + by_load(found, GOODPUT))
    print("\n### Turned away / of these without need / served and late, percent\n" + by_load(found, LOST, own))
    print("\n### Adherence of slack less that of others, points, 95% intervals over seeds\n" + paired(found))
    print("\n### Settings that counted\n" + settings(found))
    print("\n### Thirds by output length at 11/s\n" + thirds(found, 11.0))
    print("\n### Classes at 11/s: adherence / TTFT p95 ms / TPOT p95 ms\n" + classes(found, 11.0))
    print("\n### Tenants\n" + tenants(found))
    print("\n### A slower machine: as believed / 8% / 20% slower\n" + slower(found))
    print("\n### Error of slack's cost model at 11/s, by tenth of the run\n" + cost_model(found, 11.0))
    print("\n### Capacity\n" + capacity(found))
    if img is not None:
        plots(found, Path(img))


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def figure(value: float | None, member: str) -> str:
    if value is None:
        return ""
    if member in LOST:
        return f"{100 * value:.1f}"
    return f"{value:.2f}" if member in GOODPUT else f"{value:.3f}"


def title(load: str, rate: float | None) -> str:
    return f"{rate:g}/s" if load == "poisson" else TITLES[load]


def by_load(found: Results, members: Sequence[str], policies: Sequence[str] = POLICIES) -> str:
    rows = []
    for load in found.loads():
        values = [[figure(found.value(*load, policy, member), member) for member in members] for policy in policies]
        rows.append([title(*load), *(" / ".join(cell) for cell in values)])
    return markdown(["load", *policies], rows)


def paired(found: Results) -> str:
    """Return the mean difference over the seeds and half of its 95% interval (Student's t)."""
    others = [policy for policy in POLICIES if not policy.startswith("slack")]
    rows = []
    for load in found.loads():
        own = found.at(*load, "slack")
        cells = [difference(own, found.at(*load, other)) for other in others]
        rows.append([title(*load), *cells])
    return markdown(["load", *others], rows)


def difference(own: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    if own is None or other is None:
        return ""
    gaps = [a - b for a, b in zip(own["seeds"], other["seeds"], strict=True)]
    quantile = {2: 12.7, 3: 4.30, 4: 3.18, 5: 2.78}[len(gaps)]
    return f"{100 * fmean(gaps):+.1f} +- {100 * quantile * stdev(gaps) / sqrt(len(gaps)):.1f}"


def settings(found: Results) -> str:
    """Return the setting that counted, of those tried."""
    rows = []
    for load in found.loads():
        sarathi, tuned = found.at(*load, "sarathi"), found.at(*load, "scorpio-tuned")
        rows.append(
            [
                title(*load),
                sarathi and sarathi["setting"]["sarathi_token_budget"],
                tuned and tuned["setting"]["scorpio_eps"],
            ]
        )
    return markdown(["load", "sarathi: tokens", "scorpio-tuned: eps"], rows)


def thirds(found: Results, rate: float) -> str:
    rows = []
    for policy in POLICIES:
        point = found.at("poisson", rate, policy)
        if point is not None:
            parts = [f"{point['terciles'][third]:.2f}" for third in ("short", "middle", "long")]
            gap, itl = point["longest_gap_ms"], point["itl_ms"]
            rows.append([policy, *parts, f"{point['good_tok_s']:.0f}", f"{itl['p99']:.0f}", f"{gap:.0f}"])
    return markdown(["policy", "short", "middle", "long", "good tok/s", "ITL p99 ms", "longest gap ms"], rows)


def classes(found: Results, rate: float) -> str:
    shown = ("scorpio", "scorpio-tuned", "slack")
    rows = []
    for name in "123456":
        cells = []
        for policy in shown:
            point = found.at("poisson", rate, policy)
            if point is None:
                continue
            entry = point["classes"][name]
            cells.append(f"{entry['adherence']:.2f} / {entry['ttft_ms_p95']:.0f} / {entry['tpot_ms_p95']:.1f}")
        rows.append([name, *cells])
    return markdown(["class", *shown], rows)


def slower(found: Results) -> str:
    policies = [
        policy for policy in POLICIES if any(p["policy"] == policy for p in found.points if "slow" in p["load"])
    ]
    rows = []
    for rate in found.rates("slow8"):
        cells = []
        for policy in policies:
            values = [found.value(load, rate, policy, "adherence") for load in ("poisson", "slow8", "slow20")]
            cells.append(" / ".join(figure(value, "adherence") for value in values))
        rows.append([f"{rate:g}/s", *cells])
    return markdown(["load", *policies], rows)


def tenants(found: Results) -> str:
    points = [point for point in found.points if point["load"] == "tenants"]
    rows = [
        [f"{p['rate']:g}/s", p["policy"], *(f"{p['tenants'][name]:.3f}" for name in "123"), f"{p['fairness']:.3f}"]
        for p in points
    ]
    return markdown(["load", "policy", "80%", "10%", "10%", "Jain"], rows)


def cost_model(found: Results, rate: float) -> str:
    rows = []
    for load, name in (("poisson", "as believed"), ("slow8", "8% slower"), ("slow20", "20% slower")):
        point = found.at(load, rate, "slack")
        model = point and point["cost_model"]
        if model:
            for member in ("mape", "rho"):
                rows.append([f"{name}: {member}", *(f"{value:.3f}" for value in model[f"{member}_tenths"])])
    return markdown(["tenth of the run", *(str(i + 1) for i in range(10))], rows)


def capacity(found: Results) -> str:
    entries = [found.capacity[policy] for policy in POLICIES if policy in found.capacity]
    return markdown(
        ["policy", "req/s", "adherence there", "what is tight just above"],
        [[e["policy"], f"{e['rate']:.2f}", f"{e['adherence']:.4f}", e["tight_objective"]] for e in entries],
    )


def plots(found: Results, folder: Path) -> None:
    poisson = [point for point in found.points if point["load"] == "poisson" and point["policy"] in PLOTTED]
    poisson.sort(key=lambda point: PLOTTED.index(point["policy"]))
    plot_sweep(str(folder / "slo-sim-load.png"), poisson)
    plot_bursts(found, folder / "slo-sim-bursts.png")
    plot_classes(found, folder / "slo-sim-classes.png", 11.0)


def plot_bursts(found: Results, path: Path) -> None:
    """Draw groups of bars: adherence under each load that is not Poisson."""
    loads = [load for load in found.loads() if load[0] != "poisson"]
    bars(
        path,
        [title(*load) for load in loads],
        PLOTTED,
        [[found.value(*load, policy, "adherence") or 0.0 for load in loads] for policy in PLOTTED],
    )


def plot_classes(found: Results, path: Path, rate: float) -> None:
    """Draw the served share of each class and of each third by output length."""
    shown = [policy for policy in PLOTTED if found.at("poisson", rate, policy)]
    values = []
    for policy in shown:
        point = found.at("poisson", rate, policy)
        assert point is not None
        parts = [point["classes"][name]["adherence"] for name in "123456"]
        values.append([*parts, *(point["terciles"][third] for third in ("short", "middle", "long"))])
    labels = [f"class {name}" for name in "123456"] + [f"{third}\noutputs" for third in ("short", "middle", "long")]
    bars(path, labels, shown, values)


def bars(path: Path, groups: Sequence[str], names: Sequence[str], values: Sequence[Sequence[float]]) -> None:
    """Draw `values[name][group]`, shares. Needs matplotlib (the `bench` extra)."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3.8), layout="constrained")
    axes = picture.subplots()
    width = 0.85 / len(names)
    for number, (name, heights) in enumerate(zip(names, values, strict=True)):
        at = [group + (number - (len(names) - 1) / 2) * width for group in range(len(groups))]
        axes.bar(at, heights, width, label=name)
    axes.set_xticks(range(len(groups)), groups)
    axes.set(ylabel="adherence", ylim=(0, 1.02), title="simulated")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, fontsize="small")
    picture.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
