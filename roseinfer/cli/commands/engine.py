"""roseinfer engine: an engine without a server, for servers on other hosts."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.cli.commands.groups import ENGINE, engine_config
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import KeeperConfig
from roseinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from roseinfer.engine.remote.keeper import EngineKeeper

NAME = "engine"
HELP = "keep an engine for servers on other hosts (serve --engines)"
OPTIONS = OptionSet(*ENGINE, Group(KeeperConfig, "engine for others"))


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    engine = engine_config(OPTIONS, given)
    keeper = OPTIONS.build(KeeperConfig, given)
    for name in ("bind", "secret_file"):
        if getattr(keeper, name) is None:
            raise ConfigError(f"{name} must be given")
    _keep(engine, keeper)
    return 0


def _keep(engine: EngineConfig, config: KeeperConfig) -> None:
    """Look at all that can be wrong, then download, then start."""
    import asyncio
    import logging

    from roseinfer.cluster.remote.address import HostPort
    from roseinfer.config.hub import model_folder
    from roseinfer.core import logs
    from roseinfer.engine.remote.secret import SecretFile

    logs.configure(as_json=config.log_format == "json")
    logging.getLogger("roseinfer").setLevel(config.log_level.upper())
    bind = HostPort.parse(config.bind or "", "bind")
    secret = SecretFile(Path(config.secret_file or ""))
    model_folder(engine.model)

    async def serve() -> None:
        from roseinfer.engine.remote.keeper import EngineKeeper

        kept = EngineKeeper(engine, bind, secret, replicas=config.replicas, stall_s=config.stall_timeout)
        try:
            await _serve(kept, config, engine.model.model)
        finally:
            await kept.close()

    asyncio.run(serve())


async def _serve(kept: "EngineKeeper", config: KeeperConfig, model: str) -> None:
    """Until SIGINT or SIGTERM, which let requests finish; a second one does not. SIGHUP starts the engine anew."""
    import asyncio

    from roseinfer.integrations.systemd import SystemdNotifier
    from roseinfer.server.hosting import Reload, Signals, end_of, first_of

    manager = SystemdNotifier()
    signals = Signals(Reload(kept, manager))
    signals.install()
    try:
        address = await kept.launch()
        starting = asyncio.ensure_future(kept.connect())
        await first_of(asyncio.shield(starting), signals.first.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return
        starting.result()
        words = f"{model} waits for servers on {address}"
        print(words, flush=True)
        manager.ready(words)
        await first_of(signals.first.wait(), end_of(kept.failure))
        manager.stopping()
        if kept.failure.done():
            kept.failure.result()
        await first_of(kept.drain(config.drain_timeout), signals.second.wait())
    finally:
        manager.close()
