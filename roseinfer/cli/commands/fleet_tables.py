"""Tables and replays of `simulate` with several engines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

# Column -> key of `fleet`; shown if any run has it.
ROUTING_COLUMNS = {
    "retried": "retries",
    "good then": "good_retries",
    "deaths": "deaths",
    "placed again": "replaced",
    "resumed": "resumed",
    "good resumed": "good_resumed",
    "lost": "failed",
    "nobody there": "unplaced",
}


def which(point: Mapping[str, Any], several_sizes: bool) -> dict[str, Any]:
    """Return the columns that identify the fleet of a point."""
    named = {"router": point["router"]}
    return {**named, "replicas": point["replicas"]} if several_sizes else named


def several_sizes(points: Sequence[Mapping[str, Any]]) -> bool:
    return len({point.get("replicas") for point in points}) > 1


def print_fleets(points: Sequence[Mapping[str, Any]]) -> None:
    """Print what routing did to requests, and one line per engine."""
    from roseinfer.bench.report import table

    sizes = several_sizes(points)
    print(table([_fleet_row(point, sizes, points) for point in points]))
    if not sizes:
        print(table([row for point in points for row in _engine_rows(point)]))


def _fleet_row(point: Mapping[str, Any], sizes: bool, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    fleet = point["fleet"]
    row = {**which(point, sizes), "policy": point["policy"], "req/s": point["rate"] or point["offered_req_s"]}
    row |= {"adherence": f"{point['adherence']:.3f}" if point["adherence"] is not None else None}
    if sizes:
        row |= {"replica s": f"{fleet['replica_s']:.0f}", "most": f"{fleet['most_engines']:g}"}
        row["s below target"] = f"{fleet['below_target_s']:g}"
    row["prefix hits"] = f"{fleet['prefix_hit_share']:.3f}"
    for title, name in ROUTING_COLUMNS.items():
        if any(other["fleet"][name] for other in points):
            row[title] = fleet[name]
    row["placed for"] = reasons(fleet["reasons"])
    row["router us"] = f"{fleet['router_us']:.0f}"
    return row


def reasons(counts: Mapping[str, float]) -> str:
    """Format shares of reasons, most frequent first: `pace 91%, retry 9%`."""
    whole = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {count / whole:.0%}" for reason, count in ordered if count)


def _engine_rows(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for number, engine in point["fleet"]["engines"].items():
        row = {"router": point["router"], "policy": point["policy"]}
        row |= {"req/s": point["rate"] or point["offered_req_s"], "engine": number}
        row |= {name: f"{engine[member]:.3f}" for name, member in (("placed", "share"), ("busy", "busy_share"))}
        row["adherence"] = None if engine["adherence"] is None else f"{engine['adherence']:.3f}"
        row["prefix hits"] = f"{engine['prefix_hit_share']:.3f}"
        row["KV peak"] = f"{engine['kv_peak']:.3f}"
        rows.append(row)
    return rows


def run_fleet_replay(path: str) -> dict[str, Any]:
    from roseinfer.sim.parity import fleet_parity_of

    parity = fleet_parity_of(path)
    print(parity)
    routers = [{"placements": len(router.recorded), "same": router.same} for router in parity.routers]
    engines = {name: {**asdict(one), "plans_agree": one.plans_agree} for name, one in parity.engines.items()}
    return {
        "parity": {
            "engines": engines,
            "routers": routers,
            "promises": parity.promises,
            "promises_same": parity.promises_same,
            "plans_agree": parity.plans_agree,
            "medians_agree": parity.medians_agree,
            "placements_agree": parity.placements_agree,
            "promises_agree": parity.promises_agree,
        }
    }
