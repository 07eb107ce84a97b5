"""Gaps between the tokens of a stream while another client sends something hostile.

    python -m benchmarks.isolation [--seconds 5] [--only NAME ...] [--seed 0]
    python -m benchmarks.isolation --replicas [--streams 8]

Starts the real server with the embedded model and its defaults on loopback. For each case a stream runs beside as many
samples without a grammar ("free"), then beside the hostile body; what still runs is cancelled after `--seconds`.
Prints hardware, versions, seed and a table; exit code 1 if p50 is more than twice the free one, or a gap exceeds
500 ms. The bounds are for two quiet cores: other load slows the two halves of a comparison unequally.

`--replicas` runs innocent streams on two engines with a timeout of a second, and the slowest cases beside them: all of
the streams have to finish.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.faults.server import ServerUnderTest
from roseinfer.bench.report import header, percentile, table

MAX_P50_RATIO = 2.0
MAX_GAP_MS = 500.0
STREAM: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}
# A hanging request or server must not hang the benchmark.
HANG_GUARD_S = 120.0


@dataclass(frozen=True)
class Case:
    """Hostile request and how often it is sent at once. The baseline is `harmless`, sent once."""

    name: str
    body: dict[str, Any]
    harmless: dict[str, Any]
    path: str = "/v1/completions"
    copies: int = 1


def sampled(n: int, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "x", "n": n, "temperature": 1, "max_tokens": 200, **fields}


def schema(value: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": strict}}}


def lark(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


def regex(pattern: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": pattern}}


def branching_rules(count: int) -> str:
    """Return a grammar in which each rule is the next one once or twice."""
    rules = "".join(f"r_{i}: r_{i + 1} | r_{i + 1} r_{i + 1}\n" for i in range(count))
    return f'start: r_0\n{rules}r_{count}: "a"\n'


def grammar_cases() -> list[Case]:
    cases = []
    free = {n: sampled(n, ignore_eos=True) for n in (1, 128)}
    for size_kb in (1, 4, 8, 20, 50, 120, 200):
        literal = schema({"enum": ["a" * (1000 * size_kb)]})
        cases += [Case(f"enum {size_kb} kB, n {n}", sampled(n, **literal), free[n]) for n in free]
    # A choice of texts with a length for each sample, so that each sample writes another one.
    near = schema({"enum": [chr(97 + i) * 8000 for i in range(26)]})
    others = {
        "250 branching rules": lark(branching_rules(250)),
        "40 branching rules": lark(branching_rules(40)),
        "ambiguous regex": regex("(.{1,50}[ab]){1,50}"),
        "long repetition": regex("(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa){4000}"),
        "26 texts of 8 kB": near,
        "patterns": schema({"type": "array", "items": {"type": "string", "pattern": "^(.{1,30}[ab]){1,30}$"}}),
    }
    for name, fields in others.items():
        cases += [Case(f"{name}, n {n}", sampled(n, **fields), free[n]) for n in free]
    literal = schema({"enum": ["a" * 8000]})
    cases.append(Case("16 x enum 8 kB, n 8", sampled(8, **literal), free[128], copies=16))
    hidden = schema({"type": "string", "pattern": "^([a-c]{2} ){20}" + "a" * 8000 + "$"})
    cases.append(Case("slow after 20 letters, n 128", sampled(128, **hidden), free[128]))
    return cases


async def chunks(client: httpx.AsyncClient) -> AsyncIterator[tuple[float, str]]:
    """Yield the time of each chunk of a stream, and the chunk. Raises `RuntimeError` for a stream that fails."""
    async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
        async for line in answer.aiter_lines():
            if line.startswith('data: {"error":'):
                raise RuntimeError(line[:300])
            if '"text"' in line:
                yield time.perf_counter(), line


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    """Send a request and return how it ended."""
    answer = await client.post(path, json=body)
    if answer.status_code == 200:
        return "200"
    return f"{answer.status_code} {answer.json().get('error', {}).get('code')}"


@dataclass
class Seen:
    gaps_ms: list[float]
    ends: list[str]
    lasted_s: float


async def beside(url: str, path: str, body: dict[str, Any], copies: int, seconds: float) -> Seen:
    """Return the gaps of a stream from when the requests are sent until they have ended, or `seconds` have passed.

    The stream starts again when it is at its end.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S, limits=limits) as client:
        times: list[list[float]] = [[]]
        warm = asyncio.Event()

        async def run() -> None:
            while True:
                times.append([])
                async for at_s, _ in chunks(client):
                    times[-1].append(at_s)
                    if len(times[-1]) == 20:
                        warm.set()

        stream = asyncio.create_task(run())
        await warm.wait()
        began_s = time.perf_counter()
        hostile = [asyncio.create_task(ask(client, path, body)) for _ in range(copies)]
        done, pending = await asyncio.wait(hostile, timeout=seconds)
        ended_s = time.perf_counter()
        if not pending and ended_s - began_s < 1.0:
            await asyncio.sleep(1.0)  # ensures that there are gaps to measure
            ended_s = time.perf_counter()
        else:
            await asyncio.sleep(0.1)  # the gap that is open now
        if stream.done():
            stream.result()
        for task in (*pending, stream):
            task.cancel()
        await asyncio.gather(*pending, stream, return_exceptions=True)
        gaps = [
            1000 * (after - before) for part in times for before, after in itertools.pairwise(part) if after > began_s
        ]
        ends = sorted({task.result() for task in done}) + (["still running"] if pending else [])
        return Seen(gaps, ends, ended_s - began_s)


async def rest(url: str) -> None:
    """Wait until the engine is idle."""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S) as client:
        for _ in range(300):
            if (await client.get("/load")).json().get("server_load", 0) == 0:
                return
            await asyncio.sleep(0.1)


def row(case: Case, harmless: Seen, seen: Seen) -> dict[str, Any]:
    before_ms, p50_ms = percentile(harmless.gaps_ms, 50), percentile(seen.gaps_ms, 50)
    worst_ms = max(seen.gaps_ms, default=0.0)
    bad = worst_ms > MAX_GAP_MS or p50_ms > MAX_P50_RATIO * before_ms
    return {
        "beside the stream": case.name,
        "free p50 ms": round(before_ms, 1),
        "free max ms": round(max(harmless.gaps_ms, default=0.0), 1),
        "p50 ms": round(p50_ms, 1),
        "max ms": round(worst_ms, 1),
        "chunks": len(seen.gaps_ms),
        "after s": round(seen.lasted_s, 1),
        "it ended": ", ".join(seen.ends),
        "": "too slow" if bad else "",
    }


async def one_engine(cases: Sequence[Case], seconds: float) -> bool:
    rows = []
    with ServerUnderTest("tiny") as server:
        for case in cases:
            harmless = await beside(server.url, case.path, case.harmless, 1, seconds)
            await rest(server.url)
            seen = await beside(server.url, case.path, case.body, case.copies, seconds)
            await rest(server.url)
            rows.append(row(case, harmless, seen))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    return not any(found[""] for found in rows)


async def whole(client: httpx.AsyncClient) -> str:
    """Run one innocent stream and return how it ended."""
    last = ""
    try:
        async for _, line in chunks(client):
            last = line
    except (RuntimeError, httpx.HTTPError) as error:
        return str(error)
    return "finished" if '"finish_reason":"length"' in last.replace(" ", "") else f"cut: {last[:100]}"


async def two_engines(cases: Sequence[Case], streams: int) -> bool:
    rows = []
    for case in cases:
        options = ("--replicas", "2", "--engine-timeout", "1", "--stall-timeout", "1")
        with ServerUnderTest("tiny", *options) as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=HANG_GUARD_S) as client:
                before = server.engines()
                innocent = [asyncio.create_task(whole(client)) for _ in range(streams)]
                await asyncio.sleep(1.0)
                hostile = [asyncio.create_task(ask(client, case.path, case.body)) for _ in range(case.copies)]
                ends = await asyncio.gather(*innocent)
                for task in hostile:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait_for(task, 30)
                finished = ends.count("finished")
                found = {
                    "poison": case.name,
                    "finished": f"{finished} of {streams}",
                    "engines lost": len(set(before) - set(server.engines())),
                    "it ended": ", ".join(sorted({task.result() for task in hostile})),
                    "others": "; ".join(sorted(set(ends) - {"finished"}))[:200],
                }
        rows.append(found)
        print(json.dumps(found), file=sys.stderr, flush=True)
    print(table(rows))
    return all(found["finished"] == f"{streams} of {streams}" for found in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each half of a case")
    parser.add_argument(
        "--only", action="append", help="cases whose name contains this, and what they are compared with"
    )
    parser.add_argument("--replicas", action="store_true", help="two engines, and whether innocent streams finish")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    args = parser.parse_args()
    cases = grammar_cases()
    if args.only:
        cases = [case for case in cases if any(name in case.name for name in args.only)]
    for case in cases:
        case.body["seed"] = case.harmless["seed"] = args.seed
    print(header("isolation", vars(args)), flush=True)
    if args.replicas:
        cases = [case for case in cases if case.harmless["n"] == 128]
        good = asyncio.run(two_engines(cases, args.streams))
    else:
        good = asyncio.run(one_engine(cases, args.seconds))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
