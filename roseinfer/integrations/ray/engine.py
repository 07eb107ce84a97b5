"""One engine of a deployment: a Ray actor that supervises an engine process and serves it on its own port."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import monotonic
from uuid import uuid4

from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engine_server import EngineServer
from roseinfer.cluster.remote.tcp import AddressTakenError
from roseinfer.config.hub import model_folder
from roseinfer.core import logs
from roseinfer.core.errors import EngineDeadError, ResourceError
from roseinfer.integrations.ray.directory import directory, fetch_certificate
from roseinfer.integrations.ray.plan import ALL_ADDRESSES, Plan
from roseinfer.integrations.ray.register import REGISTER_INTERVAL_S, RequestCounts
from roseinfer.integrations.ray.scaling import REJECTED, WITH_OBJECTIVES, load_metrics
from roseinfer.processes.private_folder import private_folder, remove_folder

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0  # for an answer of the directory


class EngineReplica:
    """Replica of Ray Serve. It restarts its engine's process when that dies. If it gives up, `check_health` fails, and
    Serve starts another replica.
    """

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start the engine. Raise the error if it does not start."""
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
        self._tasks.append(asyncio.create_task(self._register_repeatedly()))

    async def _launch(self) -> tuple[EngineServer, HostPort]:
        plan = self._plan
        await asyncio.to_thread(model_folder, plan.engine.model)  # it may be downloaded
        async with asyncio.timeout(ASK_TIMEOUT_S):
            tls = await fetch_certificate(self._name, self._folder)

        def server_at(bind: HostPort) -> EngineServer:
            stall_s = plan.server.stall_timeout
            return EngineServer(plan.engine, bind, tls, replicas=plan.replicas, stall_s=stall_s)

        return await launch_on_free_port(server_at, _host(plan.deploy.bind), plan.deploy.port_range)

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine will not be restarted."""
        if self._server is not None and self._server.failure.done():
            raise EngineDeadError(str(self._server.failure.exception()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `scaling`, without those of requests while the directory does not answer."""
        stats = load_metrics(None if self._server is None else self._server.promise(), monotonic())
        with contextlib.suppress(Exception):  # Ray restarts the directory
            async with asyncio.timeout(ASK_TIMEOUT_S):
                totals = RequestCounts(*await (await directory()).request_totals.remote())
                stats |= {WITH_OBJECTIVES: float(totals.with_objectives), REJECTED: float(totals.rejected)}
        return stats

    # --- directory ----------------------------------------------------------------------------------------------
    async def _register_repeatedly(self) -> None:
        """Register every `REGISTER_INTERVAL_S` seconds, until cancelled."""
        while True:
            await self._register_once()
            await asyncio.sleep(REGISTER_INTERVAL_S)

    async def _register_once(self) -> None:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                entry = str(self._address), self._name, self._number, self._retiring
                self._number = await (await directory()).register.remote(*entry)
        except Exception as error:
            log.warning("cannot register in the directory, continuing to serve: %s", error)

    # --- shutdown -----------------------------------------------------------------------------------------------
    async def __del__(self) -> None:
        """Stop. Requests may finish for `drain_timeout` seconds; the rest continues on other engines."""
        self._retiring = True
        for task in self._tasks:
            task.cancel()
        server = self._server
        if server is None:
            remove_folder(self._folder)
            return
        await self._register_once()
        await server.drain(self._plan.replicas.drain_timeout)
        await server.close()
        remove_folder(self._folder)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await (await directory()).remove.remote(self._name)


async def launch_on_free_port(
    server_at: Callable[[HostPort], EngineServer], host: str, ports: range
) -> tuple[EngineServer, HostPort]:
    """Launch a server on the first free port; other engines may take ports meanwhile. Return it and its address.

    Raise `ResourceError` if all ports are taken, and the errors of `EngineServer.launch`.
    """
    for port in ports:
        server = server_at(HostPort(host, port))
        try:
            return server, await server.launch()
        except AddressTakenError:
            continue
    raise ResourceError(f"no port of {ports[0]}-{ports[-1]} is free on {host}; give another range with --engine-ports")


def _host(bind: str) -> str:
    """Return the address on which the engine listens: `bind` or, if that is all addresses, the address of its node."""
    if bind not in ALL_ADDRESSES:
        return bind
    import ray

    return str(ray.util.get_node_ip_address())
