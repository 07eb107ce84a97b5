"""roseinfer serve: the OpenAI-compatible HTTP server."""

from argparse import Namespace
from pathlib import Path

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

    from roseinfer.engine.start import start_engine
    from roseinfer.hub import model_folder, tokenizer_folder
    from roseinfer.server.run import new_event_loop, serve
    from roseinfer.text.tokenizer import Tokenizer

    model = engine.model
    model_folder(model)
    folder = tokenizer_folder(model)
    chat_template = None if server.chat_template is None else Path(server.chat_template)
    running = serve(
        lambda tokenizer: start_engine(engine, tokenizer),
        lambda: Tokenizer.from_folder(folder, chat_template),
        server,
        model.model,
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(running)
