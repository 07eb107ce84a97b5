"""A deployment on a Ray cluster of this machine. Needs the ray extra."""

import importlib.util
import os
from pathlib import Path

import pytest

from benchmarks.faults.server import until
from benchmarks.gpu_server import free_port
from benchmarks.ray_cluster import API_ACTOR, ENGINE_ACTOR, HAPROXY, RayCluster
from benchmarks.ray_faults import load, run, summary, well

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the ray extra is not installed"),
    pytest.mark.long,
]


def listeners(cluster: RayCluster, name: str) -> dict[int, set[str]]:
    """By port: the addresses on which the processes of this name listen, as they stand in /proc/net."""
    sockets = set()
    for pid in cluster.processes(name):
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
        ports = free_port()
        done = cluster.deploy(*cluster.options("--engines", "2", "--engine-ports", f"{ports}-{min(ports + 50, 65535)}"))
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(2)), cluster.get("/ready")
        base, _ = run(cluster, "none", planned, at_s)
        assert all(map(well, base)), [each.error for each in base]
        # Ray's own servers, which all its processes have, are in other ranges.
        ranges = {HAPROXY: range(65536), API_ACTOR: range(30000, 31000), ENGINE_ACTOR: range(ports, ports + 51)}
        for name, its in ranges.items():
            bound = {port: addresses for port, addresses in listeners(cluster, name).items() if port in its}
            assert bound and all(addresses == {LOOPBACK} for addresses in bound.values()), (name, bound)
        for case in ("engine+directory", "actor"):
            seen, back_s = run(cluster, case, planned, at_s)
            row = summary(case, seen, base, at_s, back_s)
            assert row["ended well"] == len(planned) and row["other text"] == 0, row
        seen, _ = run(cluster, "api", planned, at_s)
        assert not all(map(well, seen)), "the streams on it are cut, and nobody else was there"
        seen, _ = run(cluster, "none", planned[:3], at_s)
        assert all(map(well, seen)) and [each.text for each in seen] == [each.text for each in base[:3]]
