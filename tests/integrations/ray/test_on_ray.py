"""Deployment on a Ray cluster of this machine. Needs the extra `ray`."""

import importlib.util
import itertools
import os
import socket
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults.server import until
from benchmarks.gpu_server import free_port
from benchmarks.ray_faults.cluster import API_ACTOR, DIRECTORY, ENGINE_ACTOR, HAPROXY, HAPROXY_ACTOR, RayCluster
from tests.integrations.ray.ray_load import finished, run, stream_bodies

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the ray extra is not installed"),
    pytest.mark.long,
    pytest.mark.exhaustive,
]


def listeners(cluster: RayCluster, name: str) -> dict[int, set[str]]:
    """Return, by port, the addresses from /proc/net on which the processes of this name listen."""
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


def test_killed_processes_are_replaced_and_streams_continue() -> None:
    """Streams of 1.2 s: first undisturbed, then with a loss a third of the way into the load."""
    bodies, at_s = stream_bodies(rate=6.0, seconds=2.0, output=60), 0.7
    with RayCluster() as cluster:
        ports = free_port()
        done = cluster.deploy("--engines", "2", "--engine-ports", f"{ports}-{min(ports + 50, 65535)}")
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(2)), cluster.get("/ready")
        base = run(cluster, bodies, (), at_s)
        assert all(map(finished, base)), [each.error for each in base]
        # Ray's own servers, which all its processes have, use other port ranges.
        ranges = {HAPROXY: range(65536), API_ACTOR: range(30000, 31000), ENGINE_ACTOR: range(ports, ports + 51)}
        for name, its in ranges.items():
            bound = {port: addresses for port, addresses in listeners(cluster, name).items() if port in its}
            assert bound and all(addresses == {LOOPBACK} for addresses in bound.values()), (name, bound)
        for kill in (("engine", "directory"), ("actor",)):
            seen = run(cluster, bodies, kill, at_s)
            assert all(map(finished, seen)), (kill, [each.error for each in seen])
            assert [each.text for each in seen] == [each.text for each in base], kill
        seen = run(cluster, bodies, ("api",), at_s)
        assert not all(map(finished, seen)), "the only API process was killed, so its streams are cut"
        seen = run(cluster, bodies, ("haproxy",), at_s)
        assert not all(map(finished, seen)), "its streams are cut"
        assert not {404, 503} & {each.status for each in seen}, "the one that stands in knows the API processes"
        seen = run(cluster, bodies, ("haproxy actor",), at_s)
        assert all(finished(each) or each.status != 200 for each in seen), "HAProxy finishes its streams"
        seen = run(cluster, bodies[:3], (), at_s)
        assert all(map(finished, seen)) and [each.text for each in seen] == [each.text for each in base[:3]]


def counters(url: str) -> dict[str, float]:
    """Return the counters of a scrape by name and labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines if name.partition("{")[0].endswith(("_total", "_count"))}


def test_metrics_are_the_sums_of_both_api_processes() -> None:
    """Scraped through HAProxy and from each API process, while requests run."""
    bodies = stream_bodies(rate=20.0, seconds=2.0, output=30)
    with RayCluster() as cluster:
        done = cluster.deploy("--api-replicas", "2")
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(1)), cluster.get("/ready")
        ports = [port for port in listeners(cluster, API_ACTOR) if port in range(30000, 31000)]
        assert len(ports) == 2
        urls = [cluster.url, *(f"http://127.0.0.1:{port}" for port in ports)]
        before = requests_ended(counters(cluster.url))
        scrapes: list[dict[str, float]] = []
        stopped = threading.Event()

        def scrape() -> None:
            for url in itertools.cycle(urls):
                scrapes.append(counters(url))
                if stopped.wait(0.1):
                    return

        scraper = threading.Thread(target=scrape)
        scraper.start()
        seen = run(cluster, bodies, (), 0.0)
        stopped.set()
        scraper.join()
        assert all(map(finished, seen)), [each.error for each in seen]
        for url in urls:
            assert until(lambda url=url: requests_ended(counters(url)) == before + len(bodies), 10.0), url  # type: ignore[misc]
            scrapes.append(counters(url))
        assert len(scrapes) > 10
        for name in scrapes[-1]:
            values = [scrape.get(name, 0.0) for scrape in scrapes]
            assert values == sorted(values), name


def requests_ended(found: dict[str, float]) -> float:
    return sum(value for name, value in found.items() if name.startswith("vllm:request_success_total"))


def test_a_deployment_is_replaced_without_an_error() -> None:
    """A new API process gets requests only once it is connected to an engine."""
    with RayCluster() as cluster:
        done = cluster.deploy("--engines", "2")
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(2)), cluster.get("/ready")
        old = cluster.processes(API_ACTOR)
        deploying = threading.Thread(target=cluster.deploy, args=("--engines", "2", "--max-num-seqs", "48"))
        deploying.start()
        answers = Counter[tuple[int, str]]()
        while deploying.is_alive() or set(old) & set(cluster.processes(API_ACTOR)):
            status, body = cluster.get("/ready")
            answers[status, "" if status == 200 else body] += 1
        deploying.join()
        assert set(answers) == {(200, "")}


def test_a_deployment_that_fails_leaves_nothing_running() -> None:
    """Each failure is one line. The next deployment is served by an engine of its own."""
    with RayCluster() as cluster:
        with socket.create_server(("127.0.0.1", cluster.port)):
            done = cluster.deploy()
        assert done.returncode == 1 and f"port {cluster.port} at 127.0.0.1 is in use" in done.stderr
        assert done.stderr.count("\n") == 1 and not cluster.processes("ray::ServeController"), done.stderr
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            done = cluster.deploy("--engine-ports", str(port))
        assert done.returncode == 1 and f"no port of {port}-{port} is free" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        for name in (HAPROXY, HAPROXY_ACTOR, ENGINE_ACTOR, API_ACTOR, DIRECTORY, "ray::ServeController"):
            assert until(lambda name=name: not cluster.processes(name)), name  # type: ignore[misc]
        done = cluster.deploy()
        assert done.returncode == 0 and cluster.ready(1), done.stderr
        assert cluster.deploy("--down").returncode == 0
        done = cluster.deploy()
        assert done.returncode == 0, f"the ports of the previous deployment are free at once: {done.stderr}"
