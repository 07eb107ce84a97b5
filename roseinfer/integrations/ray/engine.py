"""One engine of a deployment: an actor of Ray that keeps an engine process, which answers on a port of its own."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from roseinfer.cluster.remote.address import HostPort
from roseinfer.config.hub import model_folder
from roseinfer.core import logs
from roseinfer.core.errors import EngineDeadError, ResourceError
from roseinfer.engine.remote.keeper import EngineKeeper
from roseinfer.engine.remote.secret import Secret
from roseinfer.engine.remote.tcp import AddressTakenError
from roseinfer.integrations.ray.directory import directory
from roseinfer.integrations.ray.plan import EVERYWHERE, Plan
from roseinfer.integrations.ray.register import TELL_S, Fared
from roseinfer.integrations.ray.scaling import PROMISED, REFUSED, USED
from roseinfer.router.fleet_size import engine_load

log = logging.getLogger(__name__)

ASK_S = 5.0  # which the directory may take for a word
SECRET_BYTES = 32


class EngineReplica:
    """A replica of Ray Serve. Its keeper starts the engine's process again when that dies; when the keeper gives it up,
    Serve is told by `check_health` and starts another replica.
    """

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises what keeps the engine from starting."""
        plan.set_variables()
        logs.configure(as_json=plan.server.log_format == "json")
        self._plan = plan
        self._secret = Secret(os.urandom(SECRET_BYTES))
        self._number: int | None = None
        self._retiring = False
        self._keeper: EngineKeeper | None = None
        self._address: HostPort | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._keeper, self._address = await self._launch()
        await self._keeper.connect()
        self._tasks.append(asyncio.create_task(self._tell()))

    async def _launch(self) -> tuple[EngineKeeper, HostPort]:
        plan = self._plan
        await asyncio.to_thread(model_folder, plan.engine.model)  # which may be downloaded

        def keeper_at(bind: HostPort) -> EngineKeeper:
            stall_s = plan.server.stall_timeout
            return EngineKeeper(plan.engine, bind, self._secret, replicas=plan.replicas, stall_s=stall_s)

        return await launched(keeper_at, _host(plan.deploy.bind), plan.deploy.port_range)

    async def check_health(self) -> None:
        """Raises `EngineDeadError` when the engine is not started again."""
        if self._keeper is not None and self._keeper.failure.done():
            raise EngineDeadError(str(self._keeper.failure.exception()))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """See `roseinfer.integrations.ray.scaling`. Of requests only if the directory can be asked."""
        promise = None if self._keeper is None else self._keeper.promise()
        stats = {USED: 0.0 if promise is None else engine_load(promise)}
        with contextlib.suppress(Exception):  # it is being started again
            async with asyncio.timeout(ASK_S):
                fared = Fared(*await (await directory()).fared.remote())
                stats |= {PROMISED: float(fared.promised), REFUSED: float(fared.refused)}
        return stats

    # --- the directory ------------------------------------------------------------------------------------------
    async def _tell(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._tell_once()
            await asyncio.sleep(TELL_S)

    async def _tell_once(self) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                told = str(self._address), self._secret.value, self._number, self._retiring
                self._number = await (await directory()).tell.remote(*told)
        except Exception as error:
            log.warning("the directory is not told of this engine, which serves on: %s", error)

    # --- the end ------------------------------------------------------------------------------------------------
    async def __del__(self) -> None:
        """Serve wants one engine less, or another version: requests may end here for `drain_timeout` seconds."""
        self._retiring = True
        for task in self._tasks:
            task.cancel()
        keeper = self._keeper
        if keeper is None:
            return
        await self._tell_once()
        await keeper.drain(self._plan.replicas.drain_timeout)
        await keeper.close()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ASK_S):
                await (await directory()).gone.remote(self._secret.value)


async def launched(
    keeper_at: Callable[[HostPort], EngineKeeper], host: str, ports: range
) -> tuple[EngineKeeper, HostPort]:
    """A keeper on the first port that nobody listens on, whoever else looks for one, and its address.

    Raises `ResourceError` if all are taken, and what `EngineKeeper.launch` raises.
    """
    for port in ports:
        keeper = keeper_at(HostPort(host, port))
        try:
            return keeper, await keeper.launch()
        except AddressTakenError:
            continue
    raise ResourceError(f"no port of {ports[0]}-{ports[-1]} is free on {host}: give more with --engine-ports")


def _host(bind: str) -> str:
    """Where the engine listens: the address that was given; in a cluster, that of its own node."""
    if bind not in EVERYWHERE:
        return bind
    import ray

    return str(ray.util.get_node_ip_address())
