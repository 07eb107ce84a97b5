"""Cases: what is killed or stopped, and how each is measured."""

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import Signals

from benchmarks.faults.server import until
from benchmarks.gpu_server import free_port
from benchmarks.ray_faults.cluster import (
    API_ACTOR,
    DIRECTORY,
    ENGINE,
    ENGINE_ACTOR,
    HAPROXY,
    HAPROXY_ACTOR,
    RayCluster,
    command_line,
)
from benchmarks.ray_faults.load import Load, Seen, send
from benchmarks.ray_faults.rows import Row, row_of
from benchmarks.ray_faults.store import Store, redis

ENGINES = 2
CONTROLLER = "ray::ServeController"
PARTS = (ENGINE, ENGINE_ACTOR, API_ACTOR, DIRECTORY, HAPROXY, HAPROXY_ACTOR, CONTROLLER)
WHOLE_TIMEOUT_S, CHECK_INTERVAL_S = 120.0, 0.2
REDEPLOY_STREAMS, ENGINE_STOPPED_S, STORE_DOWN_S = 160, 6.0, 5.0
MIN_FOLDER_AGE_S = 61.0


class Deployment:
    """Context manager of a cluster with a deployment of as many engines as API processes."""

    def __init__(self, store: tuple[str, str] | None = None, engines: int = ENGINES) -> None:
        self.cluster = RayCluster(store)
        self._engines = engines
        low = free_port()
        self._options = ["--engines", str(engines), "--api-replicas", str(engines)]
        self._options += ["--engine-ports", f"{low}-{min(low + 50, 65535)}"]

    def __enter__(self) -> "Deployment":
        self.cluster.__enter__()
        try:
            self.deploy()
        except BaseException:
            self.cluster.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.cluster.__exit__()

    def deploy(self, *more: str) -> None:
        """Deploy, or deploy again. Raise `RuntimeError` if that fails."""
        done = self.cluster.deploy(*self._options, *more)
        if done.returncode:
            raise RuntimeError(f"the deployment failed: {done.stderr}")
        if not until(lambda: self.cluster.ready(self._engines)):
            raise RuntimeError(f"the engines are not ready: {self.cluster.get('/ready')}")

    def counts(self) -> dict[str, int]:
        """Return the number of processes of each part. Of HAProxy, count one that does not stand in for another."""
        found = {name: len(self.cluster.processes(name)) for name in PARTS}
        found[HAPROXY] = sum("stand-in" not in command_line(pid) for pid in self.cluster.processes(HAPROXY))
        return found | {HAPROXY: min(1, found[HAPROXY])}  # older ones may still finish their streams

    def whole(self, before: dict[str, int], gone: Sequence[int]) -> bool:
        """True if all parts are there as `before`, and none of the processes `gone` is."""
        alive = set(self.cluster.processes())
        counts = self.counts()
        there = all(counts[name] >= count for name, count in before.items())
        return there and not alive & set(gone) and self.cluster.ready(self._engines)


@dataclass(slots=True)
class Strike:
    """Event that hits a deployment under load. `whole_s`: from the strike until all parts were there again."""

    deployment: Deployment
    action: Callable[["Strike"], Sequence[int]]
    whole_s: float | None = None
    note: str = ""
    before: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        self.before = self.deployment.counts()
        struck_s = time.monotonic()
        gone = self.action(self)
        until_s = struck_s + WHOLE_TIMEOUT_S
        while time.monotonic() < until_s:
            if self.deployment.whole(self.before, gone):
                self.whole_s = time.monotonic() - struck_s
                return
            time.sleep(CHECK_INTERVAL_S)
        for pid in gone:  # a stopped process that nothing has replaced
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class Case:
    """`action`: does something to a deployment and returns the processes that must end. `cut`: streams may be cut."""

    killed: str
    action: Callable[[Strike], Sequence[int]]
    cut: bool = False
    streams: int = 64


def strike_at(name: str, count: int = 1, by: Signals = signal.SIGKILL) -> Callable[[Strike], Sequence[int]]:
    """Return an action that sends a signal to the first `count` processes of this name."""

    def action(strike: Strike) -> Sequence[int]:
        cluster = strike.deployment.cluster
        pids = [cluster.haproxy()] if name == HAPROXY else cluster.processes(name)[:count]
        for pid in pids:
            os.kill(pid, by)
        return pids

    return action


def directory_and_engine(strike: Strike) -> Sequence[int]:
    """Kill the directory, and stop an engine for `ENGINE_STOPPED_S`."""
    engine = strike.deployment.cluster.processes(ENGINE)[0]
    os.kill(engine, signal.SIGSTOP)
    threading.Timer(ENGINE_STOPPED_S, os.kill, (engine, signal.SIGCONT)).start()
    return strike_at(DIRECTORY)(strike)


def redeploy(strike: Strike) -> Sequence[int]:
    cluster = strike.deployment.cluster
    old = [pid for name in (ENGINE, ENGINE_ACTOR, API_ACTOR) for pid in cluster.processes(name)]
    strike.deployment.deploy("--max-num-seqs", "48")
    return old


LOADED: dict[str, Case] = {
    "engine": Case("the process of an engine", strike_at(ENGINE)),
    "engine-actor": Case("the actor of an engine", strike_at(ENGINE_ACTOR)),
    "directory": Case("the directory, and one engine stopped for 6 s", directory_and_engine),
    "redeploy": Case("nothing: deployed again with other options", redeploy, streams=REDEPLOY_STREAMS),
    "api": Case("one of two API processes", strike_at(API_ACTOR), cut=True),
    "api-stopped": Case("one of two API processes stopped", strike_at(API_ACTOR, by=signal.SIGSTOP), cut=True),
    "engine-actors": Case("the actors of both engines", strike_at(ENGINE_ACTOR, ENGINES), cut=True),
    "engines": Case("the processes of both engines", strike_at(ENGINE, ENGINES), cut=True),
    "controller": Case("the controller of Ray Serve", strike_at(CONTROLLER)),
    "haproxy": Case("HAProxy", strike_at(HAPROXY), cut=True),
    "haproxy-stopped": Case("HAProxy stopped", strike_at(HAPROXY, by=signal.SIGSTOP), cut=True),
    "haproxy-actor": Case("the actor that watches HAProxy", strike_at(HAPROXY_ACTOR), cut=True),
}


@dataclass(slots=True)
class Bench:
    """Context of all cases: the load, the moment of the strike, and the texts of undisturbed streams.

    `deployment`: the running one, shared by cases that leave it whole.
    """

    load: Load
    at_s: float
    redis_server: str
    texts: list[str] = field(default_factory=list)
    deployment: Deployment | None = None

    def shared(self) -> Deployment:
        if self.deployment is None:
            self.deployment = Deployment().__enter__()
        return self.deployment

    def close(self) -> None:
        if self.deployment is not None:
            self.deployment.__exit__()
            self.deployment = None

    def send(self, deployment: Deployment, strike: Callable[[], None], streams: int) -> Seen:
        """Send undisturbed streams first, unless their texts are known."""
        url = deployment.cluster.url
        if not self.texts:
            seen = send(url, self._load(REDEPLOY_STREAMS), lambda: None, 0.0)
            self.texts = [stream.text for stream in seen.streams]
            if len(seen.finished()) < len(seen.streams):
                raise RuntimeError(f"undisturbed streams failed: {[stream.error for stream in seen.streams]}")
        return send(url, self._load(streams), strike, self.at_s)

    def _load(self, streams: int) -> Load:
        return replace(self.load, streams=streams)


def under_load(bench: Bench, name: str) -> Row:
    """Measure a case of `LOADED` on the shared deployment, which ends if it is not whole afterwards."""
    case = LOADED[name]
    strike = Strike(bench.shared(), case.action)
    seen = bench.send(strike.deployment, strike.run, case.streams)
    if strike.whole_s is None:
        bench.close()
    return row_of(name, case.killed, seen, bench.texts, strike.whole_s, cut=case.cut, note=strike.note)


def only_api(bench: Bench, name: str) -> Row:
    """Kill the only API process, of a deployment with one engine."""
    bench.close()
    with Deployment(engines=1) as deployment:
        strike = Strike(deployment, strike_at(API_ACTOR))
        seen = bench.send(deployment, strike.run, bench.load.streams)
    return row_of(name, "the only API process", seen, bench.texts, strike.whole_s, cut=True)


def store_killed(bench: Bench, name: str) -> Row:
    """Kill the store of the cluster's state, which is in a Redis, and start it again."""
    bench.close()
    with (
        tempfile.TemporaryDirectory() as folder,
        redis(Path(folder), bench.redis_server) as address,
        Deployment(address) as deployment,
    ):
        store = Store(deployment.cluster)

        def action(_: Strike) -> Sequence[int]:
            store.replace(STORE_DOWN_S)
            return [store.pid]

        strike = Strike(deployment, action)
        try:
            seen = bench.send(deployment, strike.run, bench.load.streams)
        finally:
            store.stop()
    return row_of(name, "`gcs_server`, with Redis, back after 5 s", seen, bench.texts, strike.whole_s, cut=False)


def taken_port(bench: Bench, name: str) -> Row:
    """Deploy to a port at which another server listens. Expect one line, exit code 1, and nothing left behind."""
    bench.close()
    with RayCluster() as cluster:
        with socket.create_server(("127.0.0.1", cluster.port)):
            done = cluster.deploy()
        lines = done.stderr.splitlines()
        until(lambda: not _parts(cluster), 10.0)
        left = _parts(cluster)
    wrong = "" if done.returncode == 1 and len(lines) == 1 and not left else f"left: {left}, {done.stderr}"
    note = f"exit code {done.returncode}, {len(lines)} line, {len(left)} parts left"
    return Row(name, "nothing: the port is taken", note=note, wrong=wrong)


def _parts(cluster: RayCluster) -> list[str]:
    return [name for name in PARTS if cluster.processes(name)]


def cluster_killed(bench: Bench, name: str) -> Row:
    """Kill the whole cluster and start it again. Expect no folder of the first deployment after that."""
    deployment = bench.shared()
    cluster = deployment.cluster
    haproxy = haproxy_folder(cluster)
    first = {haproxy, *cluster.private_folders()}
    cluster.kill()
    # Folders of HAProxy are removed a minute after they were last written, lest one that just starts loses its own.
    time.sleep(max(0.0, (haproxy / "haproxy.cfg").stat().st_mtime + MIN_FOLDER_AGE_S - time.time()))
    started_s = time.monotonic()
    cluster.start()
    deployment.deploy()
    whole_s = time.monotonic() - started_s
    left = [str(folder) for folder in first if folder.exists()]
    seen = bench.send(deployment, lambda: None, bench.load.streams)
    row = row_of(name, "all processes of the cluster, started again", seen, bench.texts, whole_s, cut=False)
    wrong = row.wrong or (f"left: {left}" if left else "")
    return replace(row, note=f"{len(first)} folders before, {len(left)} left", wrong=wrong)


def haproxy_folder(cluster: RayCluster) -> Path:
    """Return the folder of HAProxy's configuration."""
    words = command_line(cluster.haproxy()).split()
    return Path(words[words.index("-f") + 1]).parent


CASES: dict[str, Callable[[Bench, str], Row]] = {
    "taken-port": taken_port,
    **dict.fromkeys(LOADED, under_load),
    "only-api": only_api,
    "store": store_killed,
    "cluster": cluster_killed,
}
