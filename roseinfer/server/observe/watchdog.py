"""Fails open requests loudly when the engine hangs, instead of letting them wait for ever."""

import asyncio
import errno
import logging
import os
import time

from roseinfer.server.observe.throttle import ThrottledLog
from roseinfer.server.request.service import Service

log = logging.getLogger(__name__)

MAX_INTERVAL_S = 1.0


async def watch_descriptors(throttled: ThrottledLog) -> None:
    """Runs until cancelled. The event loop closes connections for which no descriptor is left without a word."""
    while True:
        await asyncio.sleep(MAX_INTERVAL_S)
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                throttled.error("no descriptor is left (ulimit -n): new connections are closed")


async def watch_engine(service: Service) -> None:
    """Runs until cancelled. A dead engine ends its streams by itself; one that hangs is noticed here."""
    interval_s = min(MAX_INTERVAL_S, service.config.stall_timeout / 4)
    well, stood_still, now_s = True, False, time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        looked_s, now_s = now_s, time.monotonic()
        if not stood_still and now_s - looked_s > service.config.stall_timeout / 2:
            # So did the engine, maybe, as when all of the server was stopped: what it has sent is read first.
            stood_still = True
            continue
        stood_still = False
        error = service.ill_health()
        if error is None or error.code == "loading" or service.returning:
            well = True
            continue
        count = service.lifecycle.interrupt_all(error)
        if well or count:
            log.error("the engine is not healthy (%s); %d running requests were failed", error.message, count)
        well = False
