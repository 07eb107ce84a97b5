"""Renewing engines on other hosts, one after the other: each keeper is asked to start its engine anew."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.supervised_engine import SETTLE_S, SETTLED_STEPS
from roseinfer.engine.api import EngineState
from roseinfer.engine.remote import tcp
from roseinfer.engine.remote.handshake import HandshakeError, Purpose
from roseinfer.engine.remote.secret import SecretSource

log = logging.getLogger("roseinfer.engine.remote")

LOOK_S = 0.05


async def rolling_restart(
    addresses: Sequence[HostPort], engines: RemoteEngines, secret: SecretSource, *, lost_s: float
) -> None:
    """Engine i is at `addresses[i]`. Each one gets no more requests and may end those it has for as long as its keeper
    allows; the next one follows when the new one has settled. One that cannot be asked is passed over; one that is not
    heard of for `lost_s` seconds, or given up, is the last.
    """
    for number, address in enumerate(addresses):
        await _another_serves(engines, number, len(addresses))
        before = engines.status(number)
        if before.state is EngineState.STARTING and before.number:
            before = before._replace(number=before.number - 1)  # it is new anyway: nothing is asked of it
        elif not await _asked(address, secret):
            continue
        if not await _is_back(engines, number, before.number, lost_s, partial(_asked, address, secret)):
            log.error("the engine at %s does not come back: the rolling restart ends here", address)
            return
        await _settled(engines, number)
    log.info("rolling restart: done")


async def _another_serves(engines: RemoteEngines, number: int, count: int) -> None:
    """Wait until another engine takes requests, if there is another one."""
    others = [other for other in range(count) if other != number]
    while others and not any(engines.status(other).state is EngineState.READY for other in others):
        await asyncio.sleep(LOOK_S)


async def _asked(address: HostPort, secret: SecretSource) -> bool:
    try:
        connection, *_ = await tcp.connect(address, secret.now(), Purpose.RENEW)
    except (HandshakeError, OSError) as error:
        why = str(error) if isinstance(error, HandshakeError) else tcp.reason(error)
        log.warning("rolling restart: the engine at %s is left as it is: %s", address, why)
        return False
    connection.close()
    log.info("rolling restart: the engine at %s", address)
    return True


async def _is_back(
    engines: RemoteEngines, number: int, before: int, lost_s: float, ask_again: Callable[[], Awaitable[bool]]
) -> bool:
    """Whether a process after `before` is up."""
    now = asyncio.get_running_loop().time
    heard_s, lost = now(), False
    while now() - heard_s < lost_s:
        status = engines.status(number)
        if status.final:
            return False
        if status.host_lost:
            lost = True
        else:
            heard_s = now()
            if status.state is EngineState.READY:
                if status.number > before:
                    return True
                if lost:  # perhaps another keeper, which counts from 1 and was asked nothing
                    before, lost = status.number, False
                    if not await ask_again():
                        return False
        await asyncio.sleep(LOOK_S)
    return False


async def _settled(engines: RemoteEngines, number: int) -> None:
    """Return when it has made some steps, or has had time to."""

    def steps() -> int:
        report = engines.report(number)
        return 0 if report is None else report.stats.steps_done

    now = asyncio.get_running_loop().time
    until_s, enough = now() + SETTLE_S, steps() + SETTLED_STEPS
    while now() < until_s and steps() < enough:
        await asyncio.sleep(LOOK_S)
