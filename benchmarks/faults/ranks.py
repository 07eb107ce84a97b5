"""Loss of one process of a two-process engine, killed or stopped: the server must restart the engine."""

import os
import signal
from collections import Counter
from functools import partial

from benchmarks.faults.client import Streams, stream_body
from benchmarks.faults.rows import CACHE, LONG, Plan, Row, told, while_streaming
from benchmarks.faults.server import ServerUnderTest, until

TWO = ("--api-workers", "1", "--tensor-parallel-size", "2", "--stall-timeout", "3", *CACHE)


async def killed_rank(plan: Plan) -> Row:
    return await _without_a_rank(plan, "kill -9 of rank 1 of 2", signal.SIGKILL, plan.rounds, {"engine_dead"})


async def stopped_rank(plan: Plan) -> Row:
    rounds = min(plan.rounds, 3)
    return await _without_a_rank(
        plan, "SIGSTOP of rank 1 of 2", signal.SIGSTOP, rounds, {"engine_unhealthy", "engine_dead"}
    )


async def _without_a_rank(plan: Plan, fault: str, number: signal.Signals, rounds: int, right: set[str]) -> Row:
    with ServerUnderTest(*TWO, "--device", plan.device) as server:
        await Streams(plan.streams).run(server.port, stream_body(8))
        before, ends, statuses = server.held(), Counter[str](), Counter[int]()
        slowest_s = 0.0
        wrong = ""
        for _ in range(rounds):
            lost = [server.engine(), *server.ranks()]
            streams = Streams(plan.streams)
            seconds = await while_streaming(server, streams, partial(os.kill, lost[1], number), LONG)
            ends += streams.ends
            statuses[server.get("/health")[0]] += 1
            if not until(partial(server.without, lost), 10.0):
                wrong = "a process of the engine is left"
            slowest_s = max(slowest_s, seconds)
            if not until(lambda: server.get("/ready")[0] == 200):
                wrong = "the engine does not come back"
        leaked, code = server.held().beyond(before), server.end()
    if not set(ends) <= right or set(statuses) != {503} or code:
        wrong = "streams end otherwise, or the server is not unhealthy"
    came = f"{told(ends)} within {slowest_s:.2f} s; each time /health 503, then two other processes; exit code {code}"
    return Row(fault, f"{rounds} x {plan.streams} streams", came, leaked, wrong)
