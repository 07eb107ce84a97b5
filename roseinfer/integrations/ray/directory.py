"""The directory of a deployment: one named actor of Ray, which engines tell of themselves and API processes ask.

No request passes by it. While it is down, and while it knows nothing yet after a start, everybody goes on with what
they were told last; engines tell it of themselves again within seconds.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

from roseinfer.core.clock import MonotonicClock
from roseinfer.integrations.ray.plan import DIRECTORY, NAMESPACE
from roseinfer.integrations.ray.register import Attainment, Engine, Fared, Register

log = logging.getLogger(__name__)

LOOK_S = 1.0


class DirectoryActor:
    """Its methods are called over Ray, each in a turn of one event loop."""

    def __init__(self) -> None:
        import ray

        clock = MonotonicClock()
        anew = ray.get_runtime_context().was_current_actor_reconstructed
        self._register = Register(clock, time.time_ns(), anew)
        self._attainment = Attainment()
        self._changed = asyncio.Event()

    async def authenticated(self) -> bool:
        """Whether the cluster that this runs on asks for a token; who deploys may have one that nobody asks for."""
        from ray._private.authentication.authentication_utils import is_token_auth_enabled

        return bool(is_token_auth_enabled())

    async def tell(self, address: str, secret: bytes, number: int | None, retiring: bool) -> int | None:
        """See `Register`."""
        before = self._register.version
        given = self._register.tell(address, secret, number, retiring)
        self._say_changes(before)
        return given

    async def known(self, number: int) -> None:
        """Of an API process: see `Register`."""
        self._register.known(number)

    async def gone(self, secret: bytes) -> None:
        before = self._register.version
        self._register.gone(secret)
        self._say_changes(before)

    async def engines(self, seen: int, patience_s: float) -> tuple[int, list[Engine]]:
        """The engines, and the version of that; waits up to `patience_s` for another version than `seen`."""
        until_s = time.monotonic() + patience_s
        while True:
            before = self._register.version
            for engine in self._register.expire():
                log.warning("%r has told nothing for long: it is taken for gone", engine)
            self._say_changes(before)
            left_s = until_s - time.monotonic()
            if self._register.version != seen or left_s <= 0:
                return self._register.version, self._register.engines()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._changed.wait()

    async def report(self, process: str, counted: tuple[float, float, float]) -> None:
        """Of an API process: see `Attainment`."""
        self._attainment.report(process, Fared(*counted))

    async def fared(self) -> Fared:
        """How all requests fared since this actor began."""
        return self._attainment.total

    def _say_changes(self, before: int) -> None:
        if self._register.version != before:
            self._changed.set()
            self._changed = asyncio.Event()


def find_directory() -> Any:
    """The handle of the actor. Raises `ValueError` if there is none."""
    import ray

    return ray.get_actor(DIRECTORY, namespace=NAMESPACE)


async def directory() -> Any:
    """The same for an event loop, which must not wait for Ray: that may be away."""
    return await asyncio.to_thread(find_directory)


def start_directory() -> Any:
    """The actor's handle; it is made if there is none. It is started again whenever it dies, and outlives whoever made
    it.
    """
    import ray

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
    return ray.remote(DirectoryActor).options(**options).remote()
