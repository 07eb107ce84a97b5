"""Measure how the server behaves under faults: what was sent, what came back, what leaked.

    python -m benchmarks.faults [--rounds 20] [--streams 32] [--bodies 20000] [--soak-minutes 10] [--only NAME ...]

Start servers of the embedded model on loopback, break them, and print a table in Markdown with hardware, versions and
seed. The run takes about as many minutes as the soak and the rounds, and ends only its own processes. It needs Linux,
since it reads /proc. Exit code 1 if something is wrong.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.faults.bodies import mutated
from benchmarks.faults.client import Connection, Streams, request_bytes, silent, stream_body
from benchmarks.faults.ranks import killed_rank, stopped_rank
from benchmarks.faults.rows import CACHE, LONG, Plan, Row, told, while_streaming
from benchmarks.faults.server import ServerUnderTest, until
from roseinfer.bench.report import hardware, versions

CUT = "taken next to nothing"  # the log's words about a client that is cut off
# Proper answers of a full server, or after the request's deadline.
PROPER_5XX = ("queue_full", "deadline_exceeded", "too_many_bodies")


def replaced_in(server: ServerUnderTest, victim: int) -> bool:
    workers = server.workers()
    return len(workers) == 2 and victim not in workers


# --- kill -9 ------------------------------------------------------------------------------------------------------
async def killed_engine(plan: Plan) -> Row:
    ends: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    slowest_s, left = 0.0, Counter[str]()
    for _ in range(plan.rounds):
        with ServerUnderTest("--api-workers", "1", *CACHE) as server:
            streams, engine = Streams(plan.streams), server.engine()
            slowest_s = max(
                slowest_s, await while_streaming(server, streams, partial(os.kill, engine, signal.SIGKILL), LONG)
            )
            ends += streams.ends
            gauges = sum(server.gauges())
            codes[f"then /health {server.get('/health')[0]}, gauges {gauges:g}, exit code {server.end()}"] += 1
            left[server.left()] += 1
    wrong = "" if set(ends) == {"engine_dead"} and len(codes) == 1 else "streams end without engine_dead"
    came = f"{told(ends)} within {slowest_s:.2f} s; {told(codes)}"
    return Row("kill -9 of the engine", f"{plan.rounds} x {plan.streams} streams", came, told(left), wrong)


async def killed_server(plan: Plan) -> Row:
    ends: Counter[str] = Counter()
    slowest_s, left = 0.0, Counter[str]()
    for _ in range(plan.rounds):
        with ServerUnderTest("--api-workers", "1", *CACHE) as server:
            streams, victim = Streams(plan.streams), server.process.pid
            server.remember()
            slowest_s = max(
                slowest_s, await while_streaming(server, streams, partial(os.kill, victim, signal.SIGKILL), LONG)
            )
            ends += streams.ends
            left[server.left()] += 1
    wrong = "" if set(left) == {"processes 0, files 0"} else "something is left of it"
    came = f"{told(ends)} within {slowest_s:.2f} s"
    return Row("kill -9 of the API process", f"{plan.rounds} x {plan.streams} streams", came, told(left), wrong)


async def killed_worker(plan: Plan) -> Row:
    with ServerUnderTest("--api-workers", "2", *CACHE) as server:
        await Streams(plan.streams).run(server.port, stream_body(8))
        before, ends = server.held(), Counter[str]()
        for _ in range(plan.rounds):
            victim = server.workers()[0]
            streams = Streams(plan.streams)
            await while_streaming(server, streams, partial(os.kill, victim, signal.SIGKILL), 200)
            ends += streams.ends
            until(partial(replaced_in, server, victim))
            # Five deaths within a minute end the server, as they should.
            await asyncio.sleep(15.0)
        leaked, code = server.held().beyond(before), server.end()
    half = plan.rounds * plan.streams // 2
    wrong = "" if ends["cut"] == half and ends["length"] == half and not code else "not half of them were cut"
    came = f"{told(ends)}; exit code {code}"
    return Row("kill -9 of one of two workers", f"{plan.rounds} x {plan.streams} streams", came, leaked, wrong)


# --- stopped ------------------------------------------------------------------------------------------------------
async def stopped_worker(plan: Plan) -> Row:
    with ServerUnderTest("--api-workers", "2", "--worker-timeout", "4", *CACHE) as server:
        await Streams(plan.streams).run(server.port, stream_body(8))
        before, victim, streams = server.held(), server.workers()[0], Streams(plan.streams)
        asked: Counter[int] = Counter()

        def strike() -> None:
            os.kill(victim, signal.SIGSTOP)
            asked.update(server.get("/health")[0] for _ in range(40))

        seconds = await while_streaming(server, streams, strike, 200)
        replaced = until(partial(replaced_in, server, victim))
        leaked = server.held().beyond(before)
    came = f"{told(streams.ends)} within {seconds:.1f} s; /health on 40 new connections: {dict(asked)}; replaced"
    wrong = "" if replaced and asked == {200: 40} else "it got connections or was not replaced"
    return Row("SIGSTOP of one of two workers", f"{plan.streams} streams", came, leaked, wrong)


async def stopped_engine(plan: Plan) -> Row:
    with ServerUnderTest("--api-workers", "1", "--stall-timeout", "3", *CACHE) as server:
        await Streams(plan.streams).run(server.port, stream_body(8))
        before, engine, streams = server.held(), server.engine(), Streams(plan.streams)
        seconds = await while_streaming(server, streams, partial(os.kill, engine, signal.SIGSTOP), LONG)
        status = server.get("/health")[0]
        os.kill(engine, signal.SIGCONT)
        back = until(lambda: server.get("/health")[0] == 200)
        leaked = server.held().beyond(before)
    came = (
        f"{told(streams.ends)} within {seconds:.1f} s; /health {status}, after SIGCONT {200 if back else 'never 200'}"
    )
    wrong = "" if set(streams.ends) == {"engine_unhealthy"} and back else "it does not say so, or does not come back"
    return Row("SIGSTOP of the engine", f"{plan.streams} streams", came, leaked, wrong)


# --- load ---------------------------------------------------------------------------------------------------------
async def tiny_cache(plan: Plan) -> Row:
    with ServerUnderTest("--api-workers", "1", "--num-kv-blocks", "24", "--max-num-seqs", "16") as server:
        before, ends = server.held(), Counter[str]()
        rng = random.Random(plan.seed)
        for _ in range(4):
            streams = [Streams(1) for _ in range(plan.streams)]
            bodies = [stream_body(rng.randrange(1, 200), n=rng.choice((1, 1, 2, 5))) for _ in streams]
            await asyncio.gather(*(one.run(server.port, body) for one, body in zip(streams, bodies, strict=True)))
            for one in streams:
                ends += one.ends
        leaked = server.held().beyond(before)
    wrong = "" if set(ends) == {"length"} else "some did not end"
    return Row("24 KV blocks", f"4 x {plan.streams} streams, n 1 to 5", told(ends), leaked, wrong)


async def wrong_bodies(plan: Plan) -> Row:
    rng = random.Random(plan.seed)
    with ServerUnderTest("--api-workers", "1", *CACHE) as server:
        await Streams(8).run(server.port, stream_body(8))
        before, statuses, wrong = server.held(), Counter[str](), Counter[str]()
        left = iter([mutated(rng) for _ in range(plan.bodies)])

        async def client() -> None:
            connection = Connection(server.port)
            for path, body in left:
                status, code = await connection.post(body, path, "host: localhost\r\nx-timeout-s: 5")
                statuses[f"{status // 100}xx" if status else "no answer"] += 1
                if not status or (status >= 500 and code not in PROPER_5XX):
                    wrong[f"{status} {code}"] += 1
            connection.close()

        await asyncio.gather(*(client() for _ in range(plan.clients)))
        leaked = server.held().beyond(before)
    return Row("mutated bodies", f"{plan.bodies} requests, seed {plan.seed}", told(statuses), leaked, told(wrong))


async def slow_readers(plan: Plan) -> Row:
    options = ("--api-workers", "1", "--write-timeout", "3", "--max-num-queued-reqs", str(plan.streams), *CACHE)
    with ServerUnderTest(*options) as server:
        before = server.held()
        # The prompt's log probabilities for each choice are more than the kernel buffers for a client.
        body = stream_body(100, n=4, logprobs=20, echo=True, prompt="x = 1\n" * 450)
        slow = [silent(server.port, request_bytes(body)) for _ in range(plan.streams // 2)]
        others = Streams(plan.streams // 4)
        await others.run(server.port, stream_body(50))
        freed = await asyncio.to_thread(until, server.idle)
        await asyncio.to_thread(until, lambda: server.log().count(CUT) >= len(slow), 20.0)
        cut = server.log().count(CUT)
        for connection in slow:
            connection.close()
        leaked = server.held().beyond(before)
    came = f"others: {told(others.ends)}; {cut} cut after 3 s, {'no' if freed else 'some'} place kept"
    wrong = (
        "" if freed and cut == len(slow) and set(others.ends) == {"length"} else "others suffer, or some are not cut"
    )
    return Row("clients that do not read", f"{len(slow)} streams of some 10 MB", came, leaked, wrong)


async def slow_writers(plan: Plan) -> Row:
    options = ("--api-workers", "1", "--max-num-queued-reqs", "16", "--body-timeout", "20", *CACHE)
    with ServerUnderTest(*options) as server:
        before, count = server.held(), 20 * plan.streams
        half = request_bytes(stream_body(4))[:-20]
        slow = [silent(server.port, half) for _ in range(count)]
        others = Streams(8)
        await others.run(server.port, stream_body(50))
        load = server.load()
        for connection in slow:
            connection.close()
        leaked = server.held().beyond(before)
    came = f"others: {told(others.ends)}; meanwhile /load {load}"
    wrong = "" if set(others.ends) == {"length"} and load == 0 else "others suffer"
    return Row("half a body", f"{count} connections, 16 places", came, leaked, wrong)


async def soak(plan: Plan) -> Row:
    rng = random.Random(plan.seed)
    with ServerUnderTest("--api-workers", "2", *CACHE) as server:
        ends: Counter[str] = Counter()

        async def client(end_s: float) -> None:
            connection = Connection(server.port)
            while time.monotonic() < end_s:
                ends[await cases(rng, server.port, connection)] += 1
            connection.close()

        async def load(seconds: float) -> None:
            await asyncio.gather(*(client(time.monotonic() + seconds) for _ in range(plan.clients)))

        await load(plan.soak_s / 5)  # what is loaded and cached at first is no leak
        middle = server.held()
        await load(plan.soak_s * 4 / 5)
        leaked, code = server.held().beyond(middle), server.end()
    wrong = "" if not code and not ends["no answer"] and not ends["5xx"] else "failures"
    came = f"{told(ends)}; exit code {code}"
    return Row(
        "soak", f"{plan.clients} clients, {plan.soak_s / 60:g} minutes", came, f"since 1/5 of it: {leaked}", wrong
    )


async def cases(rng: random.Random, port: int, connection: Connection) -> str:
    """Send a stream, a request, a mutated body, or a request whose client leaves."""
    kind = rng.random()
    if kind < 0.4:
        streams = Streams(1)
        await streams.run(
            port, stream_body(rng.randrange(1, 100), n=rng.choice((1, 1, 2)), prompt="x" * rng.randrange(1, 400))
        )
        return f"stream {next(iter(streams.ends))}"
    if kind < 0.6:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(stream_body(LONG)))
        await asyncio.sleep(rng.random() * 0.3)
        writer.transport.abort()
        return "left"
    path, body = mutated(rng)
    status, code = await connection.post(body, path, "host: localhost\r\nx-timeout-s: 5")
    if code in PROPER_5XX:
        return code
    return f"{status // 100}xx" if status else "no answer"


FAULTS: dict[str, Callable[[Plan], Awaitable[Row]]] = {
    "engine": killed_engine,
    "rank": killed_rank,
    "stopped-rank": stopped_rank,
    "server": killed_server,
    "worker": killed_worker,
    "stopped-worker": stopped_worker,
    "stopped-engine": stopped_engine,
    "cache": tiny_cache,
    "bodies": wrong_bodies,
    "readers": slow_readers,
    "writers": slow_writers,
    "soak": soak,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each kill -9")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--bodies", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--soak-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engines of two ranks")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    args = parser.parse_args(argv)
    plan = Plan(args.rounds, args.streams, args.bodies, args.clients, args.soak_minutes * 60, args.seed, args.device)
    print(f"{hardware()}\n{versions()}\nseed {plan.seed}\n")
    print(
        "| fault | sent | came back | left, or more than before | wrong |\n| --- | --- | --- | --- | --- |", flush=True
    )
    failed = False
    for name in args.only:
        row = asyncio.run(_run(FAULTS[name], plan))
        failed = failed or bool(row.wrong)
        print(f"| {row.fault} | {row.sent} | {row.came_back} | {row.leaked} | {row.wrong or 'nothing'} |", flush=True)
    return 1 if failed else 0


async def _run(fault: Callable[[Plan], Awaitable[Row]], plan: Plan) -> Row:
    return await fault(plan)


if __name__ == "__main__":
    sys.exit(main())
