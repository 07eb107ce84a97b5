"""Start or reach the engines of a server."""

import secrets
from pathlib import Path

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.directory import FixedDirectory
from roseinfer.cluster.directory_sync import start_from_directory
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.cluster.supervisor import EngineSupervisor
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import DEFAULT_ROUTER, ReplicasConfig
from roseinfer.engine.live import InflightLimit
from roseinfer.engine.remote.crew import RemoteCrew
from roseinfer.engine.remote.secret import Secret, SecretFile, SecretSource
from roseinfer.text.tokenizer import Tokenizer


async def routed_engine(
    places: EngineAddresses,
    tokenizer: Tokenizer,
    replicas: ReplicasConfig,
    inflight: InflightLimit,
    *,
    prefix: str = "",
    processes: int = 1,
    record: str | None = None,
) -> RoutedEngine:
    """The engines of somebody's crew, once one is up.

    `prefix`: no other client's of this server; `processes`: how many share the engines, this one included. `record`: a
    file for what the router decides, where there are several engines.
    """
    record_path = None if record is None else Path(record)
    router = replicas.router or DEFAULT_ROUTER
    if places.rows is None:
        secret: SecretSource = Secret(places.secret)
        if places.secret_file:
            secret = SecretFile(Path(places.secret_file), secret.now())
        # Their crew says in the log what becomes of them.
        engines = RemoteEngines(secret, quiet_s=replicas.engine_timeout, lost_s=places.stall_s, log_failures=False)
        return await start_from_directory(
            FixedDirectory(places.addresses),
            lambda entry, number: engines.connector(number, HostPort.parse(entry.address, "engines")),
            tokenizer,
            router=router,
            inflight=inflight,
            # Other servers may send requests to the same engines, and none knows what the others call theirs.
            prefix=f"{secrets.token_hex(6)}-{prefix}",
            processes=processes,
            record=record_path,
            drain_s=replicas.drain_timeout,
        )
    return await RoutedEngine.start(
        list(map(Path, places.addresses)),
        Path(places.rows),
        tokenizer,
        router=router,
        inflight=inflight,
        prefix=prefix,
        processes=processes,
        record=record_path,
    )


Supervisor = EngineSupervisor | RemoteCrew


def engine_supervisor(config: EngineConfig, replicas: ReplicasConfig, stall_s: float) -> Supervisor:
    """Return the supervisor of the server's own engines, or of those that `replicas` names. Raises as they do."""
    if not replicas.engine_list:
        return EngineSupervisor(config, replicas, stall_s=stall_s)
    addresses, secret = remote_places(replicas)
    return RemoteCrew(addresses, secret, quiet_s=replicas.engine_timeout, lost_s=stall_s)


def remote_places(replicas: ReplicasConfig) -> tuple[list[HostPort], SecretFile]:
    """Where the engines are that others keep, and what they ask for. Raises `ConfigError`."""
    addresses = [HostPort.parse(name, "engines") for name in replicas.engine_list]
    return addresses, SecretFile(Path(replicas.secret_file or ""))


def router_record(config: EngineConfig, number: int | None = None) -> str | None:
    """Where the decisions of a router go if the run is recorded: FILE.router beside FILE.0 and FILE.1 of the engines.

    `number`: of its process, where there are several.
    """
    file = config.profile.record
    return None if file is None else f"{file}.router" if number is None else f"{file}.router.{number}"
