"""roseinfer serve: the OpenAI-compatible HTTP server."""

from argparse import Namespace
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from roseinfer.commands.groups import ENGINE, engine_config
from roseinfer.core.config import EngineConfig, ServerConfig
from roseinfer.options import Group, OptionParser, OptionSet

NAME = "serve"
HELP = "serve a model over the OpenAI API"
OPTIONS = OptionSet(*ENGINE, Group(ServerConfig, "server"))


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    engine = engine_config(OPTIONS, given)
    _serve(engine, OPTIONS.build(ServerConfig, given))
    return 0


def _serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Download first, where an interrupt works and nobody is kept waiting on an open port; then serve."""
    import asyncio

    from roseinfer.hub import model_folder, tokenizer_folder
    from roseinfer.server.hosting import new_event_loop, worker_count

    model = engine.model
    model_folder(model)
    folder = tokenizer_folder(model)
    workers = worker_count(server.api_workers, model.device)
    running = _one(engine, server, folder) if workers == 1 else _several(engine, server, folder, workers)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(running)


def _one(engine: EngineConfig, server: ServerConfig, folder: Path) -> Coroutine[Any, Any, None]:
    from roseinfer.engine.start import start_engine
    from roseinfer.server.run import serve
    from roseinfer.text.tokenizer import Tokenizer

    chat_template = None if server.chat_template is None else Path(server.chat_template)
    return serve(
        lambda tokenizer: start_engine(engine, tokenizer),
        lambda: Tokenizer.from_folder(folder, chat_template),
        server,
        engine.model.model,
    )


def _several(engine: EngineConfig, server: ServerConfig, folder: Path, workers: int) -> Coroutine[Any, Any, None]:
    from roseinfer.server.fleet.manager import Served, serve_fleet

    return serve_fleet(Served(engine=engine, tokenizer=folder, server=server, workers=workers))
