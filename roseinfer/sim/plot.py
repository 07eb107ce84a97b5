"""Plot of goodput and adherence against load, by policy. Needs matplotlib (extra `bench`)."""

from collections.abc import Mapping, Sequence
from typing import Any


def label(point: Mapping[str, Any]) -> str:
    """Return the label of a line: the policy and, with several engines, the router and their number."""
    if "router" not in point:
        return str(point["policy"])
    return f"{point['policy']}, {point['router']} x {point['replicas']}"


def plot_sweep(path: str, points: Sequence[Mapping[str, Any]], title: str = "simulated") -> None:
    """Draw `points`, as in the JSON file. Goodput is over the arrival window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(label(point) for point in points):
        own = [point for point in points if label(point) == name]
        loads = [point["offered_req_s"] if point["rate"] is None else point["rate"] for point in own]
        left.plot(loads, [point["goodput_window_req_s"] for point in own], marker="o", label=name)
        right.plot(loads, [point["adherence"] for point in own], marker="o", label=name)
    figure.suptitle(title, fontsize="medium")
    left.set(xlabel="offered (req/s)", ylabel="goodput (req/s)", ylim=(0, None))
    right.set(xlabel="offered (req/s)", ylabel="adherence", ylim=(0, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    right.legend(loc="lower left")
    figure.savefig(path, dpi=100)
