"""Restart engines on other hosts one after the other: each engine's server is asked to restart its engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from roseinfer.cluster.remote import tcp
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.connect import connect
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.handshake import HandshakeError, Purpose
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.cluster.supervised_engine import SETTLE_S, SETTLED_STEPS
from roseinfer.engine.api import EngineState

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.05
Ask = Callable[[HostPort], Awaitable[bool]]


async def rolling_restart(
    addresses: Sequence[HostPort], engines: RemoteEngines, ask: Ask, *, lost_s: float, settle_s: float = SETTLE_S
) -> None:
    """Restart engine i at `addresses[i]`. `ask`: see `ask_to_restart`.

    Each engine gets no more requests, and may finish those that it has for as long as its server allows. The next one
    follows when the new process has settled (`settle_s`). An engine that cannot be asked is skipped. After an engine
    that is given up, or silent for `lost_s` seconds, no further one is restarted.
    """
    for number, address in enumerate(addresses):
        await _another_is_ready(engines, number, len(addresses))
        before = engines.status(number)
        if before.state is EngineState.STARTING and before.number:
            before = before._replace(number=before.number - 1)  # the process is new: it is not asked
        elif not await ask(address):
            continue
        if not await _is_back(engines, number, before.number, lost_s, partial(ask, address)):
            log.error("the engine at %s did not come up again; the rolling restart ends here", address)
            return
        await _settled(engines, number, settle_s)
    log.info("rolling restart: done")


async def ask_to_restart(tls: TlsFolder, address: HostPort) -> bool:
    """Ask an engine's server to restart it. Return False if that was not possible, and log why."""
    try:
        connected = await connect(address, tls, Purpose.RESTART)
    except (HandshakeError, OSError) as error:
        why = str(error) if isinstance(error, HandshakeError) else tcp.reason(error)
        log.warning("rolling restart: the engine at %s is not restarted: %s", address, why)
        return False
    connected.socket.close()
    log.info("rolling restart: the engine at %s", address)
    return True


async def _another_is_ready(engines: RemoteEngines, number: int, count: int) -> None:
    """Wait until another engine takes requests, if there is another one."""
    others = [other for other in range(count) if other != number]
    while others and not any(engines.status(other).state is EngineState.READY for other in others):
        await asyncio.sleep(CHECK_INTERVAL_S)


async def _is_back(
    engines: RemoteEngines, number: int, before: int, lost_s: float, ask_again: Callable[[], Awaitable[bool]]
) -> bool:
    """Return True when a process after `before` is up."""
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
                if lost:  # perhaps a new server, which counts from 1 and was not asked
                    before, lost = status.number, False
                    if not await ask_again():
                        return False
        await asyncio.sleep(CHECK_INTERVAL_S)
    return False


async def _settled(engines: RemoteEngines, number: int, settle_s: float) -> None:
    """Return when the engine has made some steps, or has had time to."""

    def steps() -> int:
        report = engines.report(number)
        return 0 if report is None else report.stats.steps_done

    now = asyncio.get_running_loop().time
    until_s, enough = now() + settle_s, steps() + SETTLED_STEPS
    while now() < until_s and steps() < enough:
        await asyncio.sleep(CHECK_INTERVAL_S)
