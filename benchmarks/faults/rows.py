"""Common parts of faults: their amount, a strike in the middle of streams, and a line of the table."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.client import Streams, stream_body
from benchmarks.faults.server import ServerUnderTest

CACHE = ("--num-kv-blocks", "400", "--max-num-seqs", "64")
LONG = 1500  # tokens: no stream ends by itself before the strike


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `wrong`: what should not have happened, empty if all is well."""

    fault: str
    sent: str
    came_back: str
    leaked: str
    wrong: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    streams: int
    bodies: int
    clients: int
    soak_s: float
    seed: int
    device: str = "cpu"


def told(ends: Counter[str]) -> str:
    return ", ".join(f"{count} x {end}" for end, count in ends.most_common())


async def while_streaming(server: ServerUnderTest, streams: Streams, strike: Callable[[], None], tokens: int) -> float:
    """Strike when all streams have begun. Return the seconds from then until the last of them has ended."""
    running = asyncio.create_task(streams.run(server.port, stream_body(tokens)))
    async with asyncio.timeout(120):
        await streams.all_begun.wait()
    struck_s = time.monotonic()
    strike()
    await running
    return streams.last_s - struck_s
