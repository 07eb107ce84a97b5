"""Directory of a deployment: a named Ray actor that lists the engines for API processes.

Engines register in it. It also is the certificate authority of the deployment. No request passes through it. While it
is down, processes continue with its last answers. After a restart, engines register again within seconds.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from roseinfer.cluster.remote.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsFolder
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.errors import ResourceError
from roseinfer.integrations.certificates import MAX_CA_DAYS, CertificateAuthority, write_private
from roseinfer.integrations.ray.metrics import DeploymentMetrics
from roseinfer.integrations.ray.plan import DIRECTORY, NAMESPACE
from roseinfer.integrations.ray.register import EXPIRY_S, EngineRegistry, RegisteredEngine, RequestCounts, RequestTotals
from roseinfer.server.observe.exposition import Snapshot

log = logging.getLogger(__name__)

EXPIRY_CHECK_S = 1.0


class DirectoryActor:
    """Ray actor. All its methods run in one event loop."""

    def __init__(self, ca_certificate: bytes, ca_key: bytes) -> None:
        """PEM texts of the CA. Ray keeps them, so that a restarted actor is the same CA."""
        import ray

        self._authority = CertificateAuthority.load(ca_certificate, ca_key)
        clock = MonotonicClock()
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._registry = EngineRegistry(clock, time.time_ns(), restarted)
        self._totals = RequestTotals()
        self._metrics = DeploymentMetrics(clock, restarted)
        self._changed = asyncio.Event()

    async def certificate(self, name: str) -> tuple[bytes, bytes, bytes]:
        """Issue a certificate for one process. Return PEM texts: the CA's certificate, the new one and its key."""
        issued = self._authority.issue([name], MAX_CA_DAYS)
        return issued.ca, issued.certificate, issued.key

    async def authenticated(self) -> bool:
        """Return True if this cluster requires a token. A client may have a token although none is required."""
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        return bool(is_token_auth_enabled())

    async def register(self, address: str, name: str, number: int | None, retiring: bool) -> int | None:
        """See `EngineRegistry.register`."""
        before = self._registry.version
        given = self._registry.register(address, name, number, retiring)
        self._notify_if_changed(before)
        return given

    async def reserve(self, number: int) -> None:
        """See `EngineRegistry.reserve`. API processes report the numbers that they know."""
        self._registry.reserve(number)

    async def remove(self, name: str) -> None:
        before = self._registry.version
        self._registry.remove(name)
        self._notify_if_changed(before)

    async def engines(self, seen: int, timeout_s: float) -> tuple[int, list[RegisteredEngine]]:
        """Return the engines and their version. Wait up to `timeout_s` for another version than `seen`."""
        until_s = time.monotonic() + timeout_s
        while True:
            before = self._registry.version
            for engine in self._registry.expire():
                log.warning("%s has not registered for %g s and is removed", engine, EXPIRY_S)
            self._notify_if_changed(before)
            left_s = until_s - time.monotonic()
            if self._registry.version != seen or left_s <= 0:
                return self._registry.version, self._registry.engines()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(EXPIRY_CHECK_S, left_s)):
                    await self._changed.wait()

    async def report(self, process: str, counted: tuple[float, float, float]) -> None:
        """See `RequestTotals.report`."""
        self._totals.report(process, RequestCounts(*counted))

    async def store_metrics(self, process: str, own: Snapshot) -> None:
        """Store the newest metrics of an API process."""
        self._metrics.store(process, own)

    async def exchange_metrics(self, process: str, own: Snapshot) -> list[Snapshot] | None:
        """Do the same, and return the metrics of all API processes; None while some may still be missing."""
        self._metrics.store(process, own)
        return self._metrics.all()

    async def request_totals(self) -> RequestCounts:
        """Return the counts of all requests since this actor started."""
        return self._totals.total

    def _notify_if_changed(self, before: int) -> None:
        if self._registry.version != before:
            self._changed.set()
            self._changed = asyncio.Event()


def find_directory() -> Any:
    """Return the handle of the actor. Raise `ValueError` if there is none."""
    import ray

    return ray.get_actor(DIRECTORY, namespace=NAMESPACE)


async def directory() -> Any:
    """Do the same in a thread, because Ray may not answer for a while."""
    return await asyncio.to_thread(find_directory)


def start_directory() -> Any:
    """Return the actor's handle; start the actor if there is none. It outlives this process, and Ray restarts it.

    Raise `ResourceError` if the actor is one of an earlier version, which lacks methods of this one.
    """
    import ray

    with contextlib.suppress(ValueError):
        found = find_directory()
        if not hasattr(found, "exchange_metrics"):
            raise ResourceError(
                "an earlier version of roseinfer is deployed on this Ray cluster; stop it first with --down"
            )
        return found
    authority = CertificateAuthority.create()
    options = {
        "name": DIRECTORY,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 1000,
    }
    return ray.remote(DirectoryActor).options(**options).remote(authority.certificate, authority.key)


async def fetch_certificate(name: str, folder: Path) -> TlsFolder:
    """Get a certificate of the deployment for this process, and write it into a private folder."""
    ca, certificate, key = await (await directory()).certificate.remote(name)
    for file, data in ((CA_FILE, ca), (CERTIFICATE_FILE, certificate), (KEY_FILE, key)):
        write_private(folder / file, data)
    return TlsFolder(folder)
