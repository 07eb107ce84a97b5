"""A load of `bench serve`, with what may go before it and beside it: ready check, warm-up, probes."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from roseinfer.bench.arrivals import FIRST_ID, Planned
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.open_loop import Outcome, StreamClient, client_session, run_planned, send_all, soon
from roseinfer.bench.requests import RequestShape
from roseinfer.bench.serve_config import ClientConfig
from roseinfer.core.errors import ConfigError

READY_AGAIN_S = 1.0
PROBE_TEXT = "Hi"


def measure(
    config: OpenLoopConfig, client: ClientConfig, model: str, planned: Sequence[Planned], shape: RequestShape
) -> tuple[list[Outcome], list[Outcome]]:
    """The load's outcomes by number, and those of the probes. Raises `ConfigError` if the server does not get ready."""
    first = replace(planned[0], number=0, at_s=0.0)
    if client.ready_check_timeout_sec > 0:
        asyncio.run(_until_ready(config, model, first, shape, client.ready_check_timeout_sec))
    if client.num_warmups:
        alike = [replace(first, number=number) for number in range(client.num_warmups)]
        asyncio.run(send_all(config, model, alike, _named(shape, "warmup-")))
    if client.probe_request_rate > 0:
        return asyncio.run(_with_probes(config, model, planned, shape, client.probe_request_rate))
    return run_planned(config, model, planned, shape), []


async def _until_ready(
    config: OpenLoopConfig, model: str, first: Planned, shape: RequestShape, patience_s: float
) -> None:
    deadline_s = time.monotonic() + patience_s
    while True:
        (outcome,) = await send_all(config, model, [first], _named(shape, "ready-"))
        if outcome.ok:
            return
        if time.monotonic() + READY_AGAIN_S > deadline_s:
            raise ConfigError(f"ready_check_timeout_sec: no answer in {patience_s:g} s; the last said: {outcome.error}")
        await asyncio.sleep(READY_AGAIN_S)


async def _with_probes(
    config: OpenLoopConfig, model: str, planned: Sequence[Planned], shape: RequestShape, rate: float
) -> tuple[list[Outcome], list[Outcome]]:
    """Probes are not held back by `max_concurrency`, and go on until the load has ended."""
    over = asyncio.Event()
    probing = asyncio.create_task(_probe(config, model, _named(shape, "probe-"), rate, over))
    try:
        outcomes = await send_all(config, model, planned, shape)
    finally:
        over.set()
        probes = await probing
    return sorted(outcomes, key=lambda outcome: outcome.number), probes


async def _probe(
    config: OpenLoopConfig, model: str, shape: RequestShape, rate: float, over: asyncio.Event
) -> list[Outcome]:
    """One after the other, with a gap of 1 / rate."""
    found: list[Outcome] = []
    async with client_session(config) as session:
        client = StreamClient(session, config, model, shape=replace(shape, max_concurrency=0))
        client.began_s = soon()
        while not over.is_set():
            due_s = time.monotonic() - client.began_s
            planned = Planned(len(found), due_s, [FIRST_ID], 1, text=PROBE_TEXT)
            found.append(await client.send(planned, client.body(planned)))
            try:
                await asyncio.wait_for(over.wait(), 1 / rate)
            except TimeoutError:
                continue
    return found


def _named(shape: RequestShape, kind: str) -> RequestShape:
    """Requests that do not count have ids of their own."""
    return replace(shape, id_prefix=f"{shape.id_prefix}{kind}" if shape.id_prefix else "")
