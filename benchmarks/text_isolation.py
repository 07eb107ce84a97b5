"""Large texts beside small requests: what becomes of each, how long it takes, and what memory it takes.

    python -m benchmarks.text_isolation [--model tiny] [--at-once 12] [--chats 1000] [--options ...]

Starts `roseinfer serve MODEL` on loopback, and ends it. First come chats of about 1 kB, one after the other; then so
many large bodies of each kind at once, beside completions of four tokens. Memory is resident memory of the server's
processes, added up: pages that they share count in each. Linux only.
"""

import argparse
import asyncio
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import orjson

from roseinfer.bench.report import header

SMALL = orjson.dumps({"prompt": "Once upon a time", "max_tokens": 4})
QUESTION = {"role": "user", "content": "What does this say about the sea? " * 30}
CHAT = orjson.dumps({"messages": [QUESTION], "max_tokens": 1})
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize with strings": ("/tokenize", {"prompt": "a b " * 1_900_000, "return_token_strs": True}),
    "tokenize": ("/tokenize", {"prompt": "a b " * 1_900_000}),
    "chat of special tokens": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "<|endoftext|>" * 600_000}], "max_tokens": 4},
    ),
    "with timeout_s 2": ("/v1/completions", {"prompt": "a b " * 1_900_000, "max_tokens": 4, "timeout_s": 2}),
}
START_S = 120.0
PAUSE_S = 0.05


class Server:
    """Server under test, as a context manager."""

    def __init__(self, model: str, options: list[str]) -> None:
        command = [sys.executable, "-m", "roseinfer.cli", "serve", model, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline()
        assert " is served on " in greeting, f"the server did not start: {greeting!r}"
        self.url = greeting.split(" is served on ")[1].split(";")[0].strip()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(START_S)

    def memory_mb(self) -> float:
        return sum(map(_resident_bytes, _tree(self.process.pid))) / 2**20


def _tree(pid: int) -> list[int]:
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # the process has ended meanwhile
                continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


async def post(client: httpx.AsyncClient, path: str, body: bytes) -> tuple[str, float]:
    """Send a request and return its status and code, and seconds."""
    began = time.perf_counter()
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    code = "" if answer.is_success else f" {answer.json()['error']['code']}"
    return f"{answer.status_code}{code}", time.perf_counter() - began


async def chats(client: httpx.AsyncClient, count: int) -> None:
    taken = [(await post(client, "/v1/chat/completions", CHAT))[1] for _ in range(count)]
    print(f"{count} chats of 1 kB, one token each: p50 {1000 * statistics.median(taken):.2f} ms", flush=True)


async def at_once(server: Server, client: httpx.AsyncClient, name: str, count: int) -> None:
    path, fields = LARGE[name]
    body = orjson.dumps(fields)
    small: list[tuple[str, float]] = []
    before_mb = peak_mb = server.memory_mb()

    async def beside() -> None:
        while True:
            small.append(await post(client, "/v1/completions", SMALL))
            await asyncio.sleep(PAUSE_S)

    async def watch() -> None:
        nonlocal peak_mb
        while True:
            peak_mb = max(peak_mb, await asyncio.to_thread(server.memory_mb))
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.create_task(work()) for work in (beside, watch)]
    large = await asyncio.gather(*[post(client, path, body) for _ in range(count)])
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(2)
    said = ", ".join(f"{times} x {answer}" for answer, times in Counter(answer for answer, _ in large).items())
    print(
        f"{name}: {said}; within {max(seconds for _, seconds in large):.2f} s; memory +{peak_mb - before_mb:.0f} MB, "
        f"then {server.memory_mb() - before_mb:+.0f} MB; beside them {Counter(answer for answer, _ in small)}, "
        f"at most {max((seconds for _, seconds in small), default=0):.2f} s",
        flush=True,
    )


async def run(args: argparse.Namespace) -> None:
    with Server(args.model, args.options) as server:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=START_S, limits=limits) as client:
            await post(client, "/v1/completions", SMALL)
            if args.chats:
                await chats(client, args.chats)
            for name in LARGE:
                await at_once(server, client, name, args.at_once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--options", type=shlex.split, default=[], help="of the server, as one argument")
    args = parser.parse_args()
    print(header("text isolation", vars(args)))
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
