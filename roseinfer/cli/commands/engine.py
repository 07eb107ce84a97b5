"""roseinfer engine: an engine without a server, for servers on other hosts."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.cli.commands.groups import ENGINE, REMOVED_SECRET, engine_config
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import KeeperConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.generation_config import given_document

if TYPE_CHECKING:
    from roseinfer.cluster.remote.engine_server import EngineServer

NAME = "engine"
HELP = "run an engine for servers on other hosts (serve --engines)"
OPTIONS = OptionSet(*ENGINE, Group(KeeperConfig, "engine for other hosts"), removed=REMOVED_SECRET, vllm=True)


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    engine = engine_config(OPTIONS, given)
    config = OPTIONS.build(KeeperConfig, given)
    given_document(engine.model.generation_config)  # report an unusable file before the model is downloaded
    for name in ("bind", "tls_dir"):
        if getattr(config, name) is None:
            raise ConfigError(f"{name} must be given")
    _run(engine, config)
    return 0


def _run(engine: EngineConfig, config: KeeperConfig) -> None:
    """Check the options, download the model, and start the engine."""
    import asyncio
    import logging

    from roseinfer.cluster.remote.address import HostPort
    from roseinfer.cluster.remote.engine_server import EngineServer
    from roseinfer.cluster.remote.tls import TlsFolder
    from roseinfer.config.hub import model_folder
    from roseinfer.core import logs

    logs.configure(as_json=config.log_format == "json")
    logging.getLogger("roseinfer").setLevel(config.log_level.upper())
    bind = HostPort.parse(config.bind or "", "bind")
    tls = TlsFolder(Path(config.tls_dir or ""))
    model_folder(engine.model)

    async def serve() -> None:
        server = EngineServer(engine, bind, tls, replicas=config.replicas, stall_s=config.stall_timeout)
        try:
            await _serve(server, config, engine.model.model)
        finally:
            await server.close()

    asyncio.run(serve())


async def _serve(server: "EngineServer", config: KeeperConfig, model: str) -> None:
    """Serve until SIGINT or SIGTERM; requests may then finish until a second signal. SIGHUP restarts the engine."""
    import asyncio

    from roseinfer.integrations.systemd import SystemdNotifier
    from roseinfer.server.hosting import Reload, Signals, end_of, first_of, say

    manager = SystemdNotifier()
    signals = Signals(Reload(server.rolling_restart, manager))
    signals.install()
    try:
        address = await server.launch()
        starting = asyncio.ensure_future(server.connect())
        await first_of(asyncio.shield(starting), signals.first.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return
        starting.result()
        line = f"{model} waits for servers on {address}"
        say(line)
        manager.ready(line)
        await first_of(signals.first.wait(), end_of(server.failure))
        manager.stopping()
        if server.failure.done():
            server.failure.result()
        await first_of(server.drain(config.drain_timeout), signals.second.wait())
    finally:
        manager.close()
