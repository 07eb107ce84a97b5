"""Notifications for systemd: readiness, reloads, shutdown and the watchdog (sd_notify(3))."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger("roseinfer.server")

# Longest wait for a service manager that does not read.
SEND_TIMEOUT_S = 1.0
ADDRESS, WATCHDOG_US, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class SystemdNotifier:
    """Client of the service manager. It sends nothing if the environment names no address.

    Expected calls: `ready` once, `reloading` and `reloaded` any number of times, `stopping`. Calls in another order
    send nothing. After `ready` a watchdog message is sent twice per watchdog interval, if systemd requests it.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self._address = _address(given.get(ADDRESS, ""))
        self._interval_s = _watchdog_s(given) / 2
        self._serving = False
        self._reloads = 0
        self._watchdog: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """Report that the server accepts requests. `status`: shown to the operator in one line."""
        self._serving = True
        self._send("READY=1", f"STATUS={' '.join(status.split())}")
        if self._address is not None and self._interval_s:
            self._watchdog = asyncio.create_task(self._keep_alive())

    def reloading(self) -> None:
        if self._serving:
            self._reloads += 1
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def reloaded(self) -> None:
        """Report the end of a reload, once the last of overlapping reloads has ended."""
        if self._reloads:
            self._reloads -= 1
            if self._serving and not self._reloads:
                self._send("READY=1")

    def stopping(self) -> None:
        self._serving = False
        self._send("STOPPING=1", "STATUS=running requests may finish")

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def _keep_alive(self) -> None:
        while True:
            self._send("WATCHDOG=1", timeout_s=0.0)
            await asyncio.sleep(self._interval_s)

    def _send(self, *lines: str, timeout_s: float = SEND_TIMEOUT_S) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.settimeout(timeout_s)
                out.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("cannot send %s to the service manager: %s", lines[0], error.strerror or error)


def _address(text: str) -> str | None:
    """Return the address of a path or of an abstract name that begins with @. Other kinds are not supported."""
    if text.startswith("@"):
        return f"\0{text[1:]}"
    return text if text.startswith("/") else None


def _watchdog_s(given: Mapping[str, str]) -> float:
    """Return the watchdog interval; 0 = none. A child process may inherit the interval of another process."""
    with contextlib.suppress(ValueError):
        if int(given.get(WATCHDOG_PID, os.getpid())) == os.getpid():
            return max(0, int(given.get(WATCHDOG_US, 0))) / 1e6
    return 0.0
