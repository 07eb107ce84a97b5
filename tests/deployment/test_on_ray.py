"""A deployment on a Ray cluster of this machine. Needs the ray extra."""

import importlib.util
import os
from pathlib import Path

import pytest

from benchmarks.ray_cluster import RayCluster, until
from benchmarks.ray_faults import load, run, summary, well

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the ray extra is not installed")


def listeners(pids: set[int]) -> dict[int, set[str]]:
    """By port: the addresses on which one of these processes listens, IPv6 as it stands in /proc/net."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(descriptor))
            except OSError:
                continue
    found: dict[int, set[str]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.setdefault(int(port, 16), set()).add(address)
    return found


LOOPBACK = "0100007F"


def test_what_is_killed_is_replaced_and_streams_go_on() -> None:
    """Streams of 1.2 s each time: without a fault, and with one a third of the way in."""
    planned, at_s = load(rate=6.0, seconds=2.0, output=60), 0.7
    with RayCluster() as cluster:
        done = cluster.deploy(*cluster.options("--engines", "2"))
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(2)), cluster.get("/ready")
        base, _ = run(cluster, "none", planned, at_s)
        assert all(map(well, base)), [each.error for each in base]
        # What listens of ours and of HAProxy; Ray's own servers have ports of their own.
        environment = cluster.environment
        named = {cluster.port, 7100, 7101, 30000}
        named |= {int(environment[f"RAY_SERVE_HAPROXY_{name}_PORT"]) for name in ("METRICS", "STATS")}
        bound = listeners(set(cluster.processes()))
        assert {port: bound.get(port) for port in named} == {port: {LOOPBACK} for port in named}
        for case in ("engine+directory", "actor"):
            seen, back_s = run(cluster, case, planned, at_s)
            row = summary(case, seen, base, at_s, back_s)
            assert row["ended well"] == len(planned) and row["other text"] == 0, row
        seen, _ = run(cluster, "api", planned, at_s)
        assert not all(map(well, seen)), "the streams on it are cut, and nobody else was there"
        seen, _ = run(cluster, "none", planned[:3], at_s)
        assert all(map(well, seen)) and [each.text for each in seen] == [each.text for each in base[:3]]
