"""Bringing an asynchronous engine up from its options alone, or reaching one that somebody else has brought up."""

import secrets
from collections.abc import Sequence
from pathlib import Path

from roseinfer.core.config import DEFAULT_ROUTER, EngineConfig, ModelConfig, ReplicasConfig
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.directory import FixedDirectory
from roseinfer.engine.follow import follow_directory
from roseinfer.engine.live import Inflight
from roseinfer.engine.remote.address import HostPort
from roseinfer.engine.remote.engines import RemoteEngines
from roseinfer.engine.remote.secret import Secret
from roseinfer.engine.routed import RoutedEngine
from roseinfer.engine.transport import ProcessTransport, ThreadTransport, Transport
from roseinfer.hub import model_folder, tokenizer_folder
from roseinfer.text.tokenizer import Tokenizer


async def start_engine(config: EngineConfig, tokenizer: Tokenizer, *, in_process: bool = False) -> AsyncEngine:
    """An engine in its own process, or in a thread of this one. Raises what keeps it from starting."""
    folder = model_folder(config.model)
    transport: Transport
    if in_process:
        from roseinfer.engine.process import build_engine

        transport = ThreadTransport(lambda: build_engine(config, folder))
    else:
        transport = ProcessTransport(config, folder)
    return await AsyncEngine.start(transport, tokenizer, max_inflight_requests=config.scheduler.max_inflight_requests)


async def routed_engine(
    addresses: Sequence[Path],
    board: Path,
    tokenizer: Tokenizer,
    replicas: ReplicasConfig,
    inflight: Inflight,
    *,
    prefix: str = "",
    processes: int = 1,
    record: str | None = None,
) -> RoutedEngine:
    """One engine or several of somebody's `EngineCrew`, once one is up.

    `prefix`: no other client's; `processes`: how many share the engines, this one included. `record`: a file for what
    the router decides, where there are several engines.
    """
    return await RoutedEngine.start(
        addresses,
        board,
        tokenizer,
        router=replicas.router or DEFAULT_ROUTER,
        inflight=inflight,
        prefix=prefix,
        processes=processes,
        record=None if record is None else Path(record),
    )


async def remote_engine(
    addresses: Sequence[HostPort],
    secret: Secret,
    tokenizer: Tokenizer,
    replicas: ReplicasConfig,
    inflight: Inflight,
    *,
    stall_s: float,
    processes: int = 1,
    record: str | None = None,
) -> RoutedEngine:
    """Engines that keepers on other hosts have, once one is up. The rest as for `routed_engine`.

    `stall_s`: seconds without a sign of life after which the connection to an engine is given up.
    """
    engines = RemoteEngines(secret, quiet_s=replicas.engine_timeout, lost_s=stall_s)
    return await follow_directory(
        FixedDirectory(map(str, addresses)),
        lambda entry, number: engines.way(number, HostPort.parse(entry.address, "engines")),
        tokenizer,
        router=replicas.router or DEFAULT_ROUTER,
        inflight=inflight,
        # Other servers may send requests to the same engines, and none knows what the others call theirs.
        prefix=f"{secrets.token_hex(6)}-",
        processes=processes,
        record=None if record is None else Path(record),
        patience_s=replicas.drain_timeout,
    )


def router_record(config: EngineConfig, number: int | None = None) -> str | None:
    """Where the decisions of a router go if the run is recorded: FILE.router beside FILE.0 and FILE.1 of the engines.

    `number`: of its process, where there are several.
    """
    file = config.profile.record
    return None if file is None else f"{file}.router" if number is None else f"{file}.router.{number}"


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """The model's own tokenizer, or the one that `tokenizer` names."""
    return Tokenizer.from_folder(tokenizer_folder(config))
