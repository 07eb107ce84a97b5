"""Seeded streams against a deployment on Ray while some of its processes are killed."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Sequence

from benchmarks.faults.server import until
from benchmarks.ray_faults.cluster import (
    API_ACTOR,
    DIRECTORY,
    ENGINE,
    ENGINE_ACTOR,
    HAPROXY,
    HAPROXY_ACTOR,
    RayCluster,
)
from roseinfer.bench.exchange import Exchange, send_request

NAMES = {"engine": ENGINE, "actor": ENGINE_ACTOR, "api": API_ACTOR, "directory": DIRECTORY}
NAMES |= {"haproxy": HAPROXY, "haproxy actor": HAPROXY_ACTOR}
RECOVERY_TIMEOUT_S = 90.0


def stream_bodies(rate: float, seconds: float, output: int) -> list[tuple[float, bytes]]:
    """Return (arrival in seconds, body) of streams of `output` tokens, each with its own seed, at random times."""
    draw = random.Random(0)
    found: list[tuple[float, bytes]] = []
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        body = {
            "prompt": [draw.randrange(10, 500) for _ in range(50)],
            "max_tokens": output,
            "ignore_eos": True,
            "seed": len(found),
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found.append((at_s, json.dumps(body).encode()))
    return found


def run(cluster: RayCluster, bodies: Sequence[tuple[float, bytes]], kill: Sequence[str], at_s: float) -> list[Exchange]:
    """Send all streams; `at_s` into the load kill the first process of each name in `kill` and await its successor."""
    before = {name: len(cluster.processes(name)) for name in NAMES.values()} | {HAPROXY: 1}

    def kill_and_wait() -> None:
        pids = [cluster.haproxy() if name == "haproxy" else cluster.processes(NAMES[name])[0] for name in kill]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

        def recovered() -> bool:
            now = {name: cluster.processes(name) for name in NAMES.values()}
            whole = all(len(now[name]) >= count for name, count in before.items())
            gone = not any(pid in running for pid in pids for running in now.values())
            return whole and gone and cluster.ready(before[ENGINE])

        assert until(recovered, RECOVERY_TIMEOUT_S), f"not recovered from the loss of {kill}"

    async def kill_later(began_s: float) -> None:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        if kill:
            await asyncio.to_thread(kill_and_wait)

    async def send_all() -> list[Exchange]:
        import aiohttp

        found = [Exchange(due_s=due_s) for due_s, _ in bodies]
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            began_s = time.monotonic() + 0.1
            url = f"{cluster.url}/v1/completions"
            pairs = zip(found, bodies, strict=True)
            sent = [send_request(session, url, body, headers, seen, began_s, texts=True) for seen, (_, body) in pairs]
            await asyncio.gather(kill_later(began_s), *sent)
        return found

    return asyncio.run(send_all())


def finished(seen: Exchange) -> bool:
    return seen.ok and seen.error is None
