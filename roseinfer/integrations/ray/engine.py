"""One engine of a deployment: an actor of Ray that supervises an engine process and serves it on its own port."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from uuid import uuid4

from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engine_server import EngineServer
from roseinfer.cluster.remote.tcp import AddressTakenError
from roseinfer.config.hub import model_folder
from roseinfer.core import logs
from roseinfer.core.errors import EngineDeadError, ResourceError
from roseinfer.integrations.ray.directory import directory, fetch_certificate
from roseinfer.integrations.ray.plan import EVERYWHERE, Plan
from roseinfer.integrations.ray.register import TELL_S, Fared
from roseinfer.integrations.ray.scaling import PROMISED, REFUSED, USED
from roseinfer.processes.private_folder import private_folder, remove_folder
from roseinfer.router.fleet_size import engine_load

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0  # for an answer of the directory


class EngineReplica:
    """A replica of Ray Serve. It restarts its engine's process when that dies. If it gives up, `check_health`
    fails, and Serve starts another replica.
    """

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raise what keeps the engine from starting."""
        plan.set_variables()
        logs.configure(as_json=plan.server.log_format == "json")
        self._plan = plan
        self._name = f"engine-{uuid4().hex}"
        self._folder = private_folder()
        self._number: int | None = None
        self._retiring = False
        self._server: EngineServer | None = None
        self._address: HostPort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._server, self._address = await self._launch()
        await self._server.connect()
        self._tasks.append(asyncio.create_task(self._tell()))

    async def _launch(self) -> tuple[EngineServer, HostPort]:
        plan = self._plan
        await asyncio.to_thread(model_folder, plan.engine.model)  # it may be downloaded
        async with asyncio.timeout(ASK_TIMEOUT_S):
            tls = await fetch_certificate(self._name, self._folder)

        def server_at(bind: HostPort) -> EngineServer:
            stall_s = plan.server.stall_timeout
            return EngineServer(plan.engine, bind, tls, replicas=plan.replicas, stall_s=stall_s)

        return await launched(server_at, _host(plan.deploy.bind), plan.deploy.port_range)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` when the engine is not restarted any more."""
        if self._server is not None and self._server.failure.done():
            raise EngineDeadError(str(self._server.failure.exception()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """See `roseinfer.integrations.ray.scaling`. Figures of requests are left out while there is no directory."""
        promise = None if self._server is None else self._server.promise()
        stats = {USED: 0.0 if promise is None else engine_load(promise)}
        with contextlib.suppress(Exception):  # it is being restarted
            async with asyncio.timeout(ASK_TIMEOUT_S):
                fared = Fared(*await (await directory()).fared.remote())
                stats |= {PROMISED: float(fared.promised), REFUSED: float(fared.refused)}
        return stats

    # --- the directory ------------------------------------------------------------------------------------------
    async def _tell(self) -> None:
        """Register again and again, until cancelled."""
        while True:
            await self._tell_once()
            await asyncio.sleep(TELL_S)

    async def _tell_once(self) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                told = str(self._address), self._name, self._number, self._retiring
                self._number = await (await directory()).tell.remote(*told)
        except Exception as error:
            log.warning("this engine cannot register in the directory, and continues to serve: %s", error)

    # --- the end ------------------------------------------------------------------------------------------------
    async def __del__(self) -> None:
        """Serve wants fewer engines, or another version: requests may finish here for `drain_timeout` seconds."""
        self._retiring = True
        for task in self._tasks:
            task.cancel()
        server = self._server
        if server is None:
            remove_folder(self._folder)
            return
        await self._tell_once()
        await server.drain(self._plan.replicas.drain_timeout)
        await server.close()
        remove_folder(self._folder)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await (await directory()).gone.remote(self._name)


async def launched(
    server_at: Callable[[HostPort], EngineServer], host: str, ports: range
) -> tuple[EngineServer, HostPort]:
    """Start a server on the first free port, while others may look for one too. Return it with its address.

    Raise `ResourceError` if all are taken, and what `EngineServer.launch` raises.
    """
    for port in ports:
        server = server_at(HostPort(host, port))
        try:
            return server, await server.launch()
        except AddressTakenError:
            continue
    raise ResourceError(f"no port of {ports[0]}-{ports[-1]} is free on {host}; give more with --engine-ports")


def _host(bind: str) -> str:
    """Return where the engine listens: at the given address or, in a cluster, at that of its node."""
    if bind not in EVERYWHERE:
        return bind
    import ray

    return str(ray.util.get_node_ip_address())
