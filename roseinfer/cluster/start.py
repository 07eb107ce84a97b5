"""Supervise the engines of a server, and connect to them."""

import secrets
from pathlib import Path

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.cluster.directory import FixedDirectory
from roseinfer.cluster.directory_sync import start_from_directory
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.supervisor import RemoteSupervisor
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.cluster.routed import RoutedEngine, RouterSetup
from roseinfer.cluster.supervisor import EngineSupervisor
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import DEFAULT_ROUTER, ReplicasConfig
from roseinfer.engine.live import InflightLimit, LiveRequests
from roseinfer.text.tokenizer import Tokenizer


async def routed_engine(
    addresses: EngineAddresses,
    tokenizer: Tokenizer,
    replicas: ReplicasConfig,
    inflight: InflightLimit,
    *,
    prefix: str = "",
    processes: int = 1,
    record: str | None = None,
) -> RoutedEngine:
    """Connect to supervised engines, which may be another process's. Return once one is up.

    `prefix`: of request ids, different from that of the server's other clients. `processes`: number of clients that
    share the engines, this one included. `record`: file for the router's decisions, if there are several engines.
    """
    router = RouterSetup(
        name=replicas.router or DEFAULT_ROUTER, processes=processes, record=None if record is None else Path(record)
    )
    if addresses.rows is None:
        # Their supervisor logs failures.
        tls = TlsFolder(Path(addresses.tls_dir))
        engines = RemoteEngines(tls, quiet_s=replicas.engine_timeout, lost_s=addresses.stall_s, log_failures=False)
        return await start_from_directory(
            FixedDirectory(addresses.addresses),
            lambda entry, number: engines.connector(number, HostPort.parse(entry.address, "engines")),
            # Other servers, with request ids of their own, may use the same engines.
            LiveRequests(tokenizer, None, inflight, f"{secrets.token_hex(6)}-{prefix}"),
            router,
            replicas.drain_timeout,
        )
    requests = LiveRequests(tokenizer, None, inflight, prefix)
    paths = list(map(Path, addresses.addresses))
    return await RoutedEngine.start(paths, Path(addresses.rows), requests, router, addresses.first)


Supervisor = EngineSupervisor | RemoteSupervisor


def engine_supervisor(config: EngineConfig, replicas: ReplicasConfig, stall_s: float, first: int = 0) -> Supervisor:
    """Return the supervisor of the server's own engines, or of those that `replicas` names. Raises as they do.

    `first`: number of the first of its own engines.
    """
    if not replicas.engine_list:
        return EngineSupervisor(config, replicas, stall_s=stall_s, first=first)
    addresses, tls = remote_addresses(replicas)
    return RemoteSupervisor(addresses, tls, quiet_s=replicas.engine_timeout, lost_s=stall_s)


def remote_addresses(replicas: ReplicasConfig) -> tuple[list[HostPort], TlsFolder]:
    """Return the addresses of engines on other hosts, and our certificates. Raises `ConfigError`."""
    addresses = [HostPort.parse(name, "engines") for name in replicas.engine_list]
    return addresses, TlsFolder(Path(replicas.tls_dir or ""))


def router_record(config: EngineConfig, number: int | None = None) -> str | None:
    """Return the file for a router's decisions if the run is recorded: FILE.router, next to FILE.0 of engine 0.

    `number`: of the router's process, if there are several.
    """
    file = config.profile.record
    return None if file is None else f"{file}.router" if number is None else f"{file}.router.{number}"
