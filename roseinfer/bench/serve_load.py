"""Load of `bench serve` with its ready check, warm-up and probes."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from roseinfer.bench.arrivals import MIN_TOKEN_ID, PlannedRequest
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.open_loop import (
    READY_RETRY_S,
    LoadOutcome,
    StreamClient,
    client_session,
    run_planned,
    send_all,
    start_time,
)
from roseinfer.bench.requests import RequestTemplate
from roseinfer.bench.serve_config import ClientConfig
from roseinfer.core.errors import ConfigError

PROBE_TEXT = "Hi"


def measure(
    config: OpenLoopConfig,
    client: ClientConfig,
    model: str,
    planned: Sequence[PlannedRequest],
    template: RequestTemplate,
) -> tuple[list[LoadOutcome], list[LoadOutcome]]:
    """Return outcomes of the load by number, and of the probes. Raise `ConfigError` if the server is not ready."""
    first = replace(planned[0], number=0, at_s=0.0)
    if client.ready_check_timeout_sec > 0:
        asyncio.run(_until_ready(config, model, first, template, client.ready_check_timeout_sec))
    if client.num_warmups:
        warmups = [replace(first, number=number) for number in range(client.num_warmups)]
        asyncio.run(send_all(config, model, warmups, _with_id_prefix(template, "warmup-")))
    if client.probe_request_rate > 0:
        return asyncio.run(_with_probes(config, model, planned, template, client.probe_request_rate))
    return run_planned(config, model, planned, template), []


async def _until_ready(
    config: OpenLoopConfig, model: str, first: PlannedRequest, template: RequestTemplate, timeout_s: float
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        (outcome,) = await send_all(config, model, [first], _with_id_prefix(template, "ready-"))
        if outcome.ok:
            return
        if time.monotonic() + READY_RETRY_S > deadline_s:
            raise ConfigError(f"ready_check_timeout_sec: no answer in {timeout_s:g} s; last error: {outcome.error}")
        await asyncio.sleep(READY_RETRY_S)


async def _with_probes(
    config: OpenLoopConfig, model: str, planned: Sequence[PlannedRequest], template: RequestTemplate, rate: float
) -> tuple[list[LoadOutcome], list[LoadOutcome]]:
    """Run probes until the load has ended; `max_concurrency` does not apply to them."""
    ended = asyncio.Event()
    probing = asyncio.create_task(_probe(config, model, _with_id_prefix(template, "probe-"), rate, ended))
    try:
        outcomes = await send_all(config, model, planned, template)
    finally:
        ended.set()
        probes = await probing
    return sorted(outcomes, key=lambda outcome: outcome.number), probes


async def _probe(
    config: OpenLoopConfig, model: str, template: RequestTemplate, rate: float, ended: asyncio.Event
) -> list[LoadOutcome]:
    """Send probes one after the other, 1 / rate apart."""
    found: list[LoadOutcome] = []
    async with client_session(config) as session:
        client = StreamClient(session, config, model, template=replace(template, max_concurrency=0))
        client.began_s = start_time()
        while not ended.is_set():
            due_s = time.monotonic() - client.began_s
            planned = PlannedRequest(len(found), due_s, [MIN_TOKEN_ID], 1, text=PROBE_TEXT)
            found.append(await client.send(planned, client.body(planned)))
            try:
                await asyncio.wait_for(ended.wait(), 1 / rate)
            except TimeoutError:
                continue
    return found


def _with_id_prefix(template: RequestTemplate, kind: str) -> RequestTemplate:
    """Return the template with other request ids for requests that do not count."""
    return replace(template, id_prefix=f"{template.id_prefix}{kind}" if template.id_prefix else "")
