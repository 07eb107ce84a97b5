"""The directory of a deployment: a named actor of Ray with which engines register, and which API processes ask.

It also is the certificate authority of the deployment. No request passes through it. While it is down, processes
continue with its last answers. After a restart, engines register again within seconds.
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
from roseinfer.integrations.ray.plan import DIRECTORY, NAMESPACE
from roseinfer.integrations.ray.register import Attainment, Fared, Register, RegisteredEngine

log = logging.getLogger(__name__)

LOOK_S = 1.0


class DirectoryActor:
    """Actor whose methods are called over Ray, in one event loop."""

    def __init__(self, ca_certificate: bytes, ca_key: bytes) -> None:
        """PEM texts of the CA. Ray keeps them, so that a restarted actor is the same CA."""
        import ray

        self._authority = CertificateAuthority.load(ca_certificate, ca_key)
        clock = MonotonicClock()
        anew = ray.get_runtime_context().was_current_actor_reconstructed
        self._register = Register(clock, time.time_ns(), anew)
        self._attainment = Attainment()
        self._changed = asyncio.Event()

    async def certificate(self, name: str) -> tuple[bytes, bytes, bytes]:
        """Issue a certificate for one process. Return PEM texts: the CA's certificate, the new one and its key."""
        issued = self._authority.issue([name], MAX_CA_DAYS)
        return issued.ca, issued.certificate, issued.key

    async def authenticated(self) -> bool:
        """Return True if this cluster requires a token. A client may have one that nobody requires."""
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        return bool(is_token_auth_enabled())

    async def tell(self, address: str, name: str, number: int | None, retiring: bool) -> int | None:
        """See `Register`."""
        before = self._register.version
        given = self._register.tell(address, name, number, retiring)
        self._say_changes(before)
        return given

    async def known(self, number: int) -> None:
        """Reserve the number of an engine that an API process knows, see `Register`."""
        self._register.known(number)

    async def gone(self, name: str) -> None:
        before = self._register.version
        self._register.gone(name)
        self._say_changes(before)

    async def engines(self, seen: int, patience_s: float) -> tuple[int, list[RegisteredEngine]]:
        """Return the engines and their version. Wait up to `patience_s` for another version than `seen`."""
        until_s = time.monotonic() + patience_s
        while True:
            before = self._register.version
            for engine in self._register.expire():
                log.warning("%r has not registered for a long time, and is removed", engine)
            self._say_changes(before)
            left_s = until_s - time.monotonic()
            if self._register.version != seen or left_s <= 0:
                return self._register.version, self._register.engines()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._changed.wait()

    async def report(self, process: str, counted: tuple[float, float, float]) -> None:
        """Take the counters of an API process, see `Attainment`."""
        self._attainment.report(process, Fared(*counted))

    async def fared(self) -> Fared:
        """Return how all requests fared since this actor began."""
        return self._attainment.total

    def _say_changes(self, before: int) -> None:
        if self._register.version != before:
            self._changed.set()
            self._changed = asyncio.Event()


def find_directory() -> Any:
    """Return the handle of the actor. Raise `ValueError` if there is none."""
    import ray

    return ray.get_actor(DIRECTORY, namespace=NAMESPACE)


async def directory() -> Any:
    """Do the same in a thread, because Ray may not answer."""
    return await asyncio.to_thread(find_directory)


def start_directory() -> Any:
    """Return the actor's handle, and start the actor if there is none. Ray restarts it, and it outlives this process.

    Raise `ResourceError` if the actor is one of an earlier version, which issued no certificates.
    """
    import ray

    with contextlib.suppress(ValueError):
        found = find_directory()
        if not hasattr(found, "certificate"):
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
