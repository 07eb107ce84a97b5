"""What a service manager is told of the server's life, by systemd's protocol: one datagram a word (sd_notify(3))."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger("roseinfer.server")

# How long a manager that does not read may hold us up with a word that is said once.
PATIENCE_S = 1.0
ADDRESS, WATCHDOG_US, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


class ServiceManager:
    """Without an address in the environment nobody is told. In this order: `ready` once, `reloading` and `reloaded`
    as often as that happens, `stopping`; what comes out of turn is not said.

    From `ready` on the manager hears twice in the time that it gives us that the event loop turns, if it asks for that.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self._address = _address(given.get(ADDRESS, ""))
        self._every_s = _watchdog_s(given) / 2
        self._serving = False
        self._reloads = 0
        self._alive: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """It serves: whoever waits for the start goes on. `status` is what an operator reads of it, in one line."""
        self._serving = True
        self._tell("READY=1", f"STATUS={' '.join(status.split())}")
        if self._address is not None and self._every_s:
            self._alive = asyncio.create_task(self._keep_alive())

    def reloading(self) -> None:
        if self._serving:
            self._reloads += 1
            self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def reloaded(self) -> None:
        """Of several that overlap, the last to end counts."""
        if self._reloads:
            self._reloads -= 1
            if self._serving and not self._reloads:
                self._tell("READY=1")

    def stopping(self) -> None:
        self._serving = False
        self._tell("STOPPING=1", "STATUS=running requests may finish")

    def close(self) -> None:
        if self._alive is not None:
            self._alive.cancel()

    async def _keep_alive(self) -> None:
        while True:
            self._tell("WATCHDOG=1", patience_s=0.0)
            await asyncio.sleep(self._every_s)

    def _tell(self, *lines: str, patience_s: float = PATIENCE_S) -> None:
        """What goes wrong is the manager's loss. It reads at once, unless it is in trouble itself."""
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.settimeout(patience_s)
                out.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", lines[0], error.strerror or error)


def _address(text: str) -> str | None:
    """A path, or an abstract name that begins with @. Others, such as a virtual machine's host, are not known here."""
    if text.startswith("@"):
        return f"\0{text[1:]}"
    return text if text.startswith("/") else None


def _watchdog_s(given: Mapping[str, str]) -> float:
    """In which it must be heard of us; 0 = not at all. A process that is not meant may find another's."""
    with contextlib.suppress(ValueError):
        if int(given.get(WATCHDOG_PID, os.getpid())) == os.getpid():
            return max(0, int(given.get(WATCHDOG_US, 0))) / 1e6
    return 0.0
