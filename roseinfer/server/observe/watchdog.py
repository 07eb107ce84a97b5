"""Watchdogs: end running requests when the engine hangs, and log when descriptors run out."""

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
    """Run until cancelled. Without descriptors the event loop closes new connections silently."""
    while True:
        await asyncio.sleep(MAX_INTERVAL_S)
        try:
            os.close(os.dup(0))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                throttled.error("out of file descriptors (ulimit -n): new connections are closed")


async def watch_engine(service: Service) -> None:
    """Run until cancelled. A dead engine ends its streams itself; a hung engine is detected here."""
    interval_s = min(MAX_INTERVAL_S, service.config.stall_timeout / 4)
    healthy, was_suspended, now_s = True, False, time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        last_s, now_s = now_s, time.monotonic()
        if not was_suspended and now_s - last_s > service.config.stall_timeout / 2:
            # This process itself was suspended, maybe with the engine: read the engine's pending output first.
            was_suspended = True
            continue
        was_suspended = False
        error = service.ill_health()
        if error is None or error.code == "loading" or service.returning:
            healthy = True
            continue
        count = service.lifecycle.interrupt_all(error)
        if healthy or count:
            log.error("unhealthy engine (%s): ended %d running requests", error.message, count)
        healthy = False
