"""Server of `chat` and `complete`: one that is running, or one started for them."""

import re
import secrets
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roseinfer.cli.commands.groups import ENGINE
from roseinfer.cli.terminal.config import AskConfig, RemoteConfig
from roseinfer.cli.terminal.objectives import parse_objectives
from roseinfer.cli.terminal.remote import Remote, given_key, is_url
from roseinfer.config.options import Group, OptionSet
from roseinfer.config.parser import OptionParser
from roseinfer.core.config.engine import PRICED
from roseinfer.core.errors import ConfigError
from roseinfer.core.generation_config import given_document
from roseinfer.core.progress import report, stage

if TYPE_CHECKING:
    from roseinfer.cli.terminal.own_server import OwnServer

_ADDRESS = re.compile(r"[\w.-]+:\d+(/v1)?/?")
SERVER, ANSWERS = Group(RemoteConfig, "server"), Group(AskConfig, "answers")
# One person asks one question at a time: fewer seats start faster and leave more memory for the context.
DEFAULT_OWN_SEATS = 4


def add_quick(parser: OptionParser, help: str) -> None:
    parser.add_argument("-q", "--quick", metavar="MSG", help=help)


def read(options: OptionSet, args: Namespace) -> dict[str, Any]:
    """Return the given options; MODEL may be a URL. Raises `ConfigError`."""
    given = options.read(args)
    model = str(given.get("model", ""))
    if _ADDRESS.fullmatch(model) and not Path(model).exists():
        raise ConfigError(f"{model!r} is no model; if it is a server, write http://{model}")
    if is_url(model):
        if "url" in given:
            raise ConfigError("url is given twice")
        given["url"] = given.pop("model")
    options.build(AskConfig, given)
    parse_objectives(given.get("slo") or "")
    for name, text in (("--quick", args.quick), ("system_prompt", given.get("system_prompt"))):
        _check_text(name, text or "")
    if "url" in given:
        for_engine = sorted({option.name for group in ENGINE for option in group.options()} & given.keys())
        if for_engine:
            hint = "; --model-name NAME selects one of its models" if "model" in for_engine else ""
            raise ConfigError(f"{for_engine[0]} cannot be combined with --url: that server has its own engine{hint}")
    elif "model_name" in given or "api_key" in given:
        raise ConfigError("--model-name and --api-key require --url")
    return given


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()  # invalid bytes of a command line become lone surrogates
    except UnicodeError:
        raise ConfigError(f"{name} is not UTF-8 text") from None


@contextmanager
def server(options: OptionSet, given: Mapping[str, Any]) -> "Iterator[tuple[Remote, OwnServer | None]]":
    """Yield the server to ask, and the same object again if we started it; our own ends with the context."""
    config = options.build(RemoteConfig, given)
    if config.url is not None:
        yield Remote(config.url, given_key(config.api_key)), None
        return
    from roseinfer.cli.terminal.own_server import OwnServer

    download(options, given)
    # With the seed of `serve`, each start would give the same answers.
    drawn = {"max_num_seqs": DEFAULT_OWN_SEATS, "seed": secrets.randbelow(2**31)}
    flags = engine_flags({**drawn, **given})
    with ExitStack() as stack:
        with stage("starting the engine"):
            own = stack.enter_context(OwnServer(flags, report))
        yield own.remote, own


def engine_flags(given: Mapping[str, Any]) -> list[str]:
    """Return the flags of `serve` for the given options of an engine."""
    options = [option for group in ENGINE for option in group.options() if option.name in given]
    return [flag for option in options for flag in option.as_flags(given[option.name])]


def download(options: OptionSet, given: Mapping[str, Any]) -> None:
    """Download the model in this process, where the hub's progress bar and Ctrl+C work."""
    from roseinfer.config.hub import model_folder, tokenizer_folder
    from roseinfer.core.config.engine import ModelConfig

    model = options.build(ModelConfig, given)
    given_document(model.generation_config)  # report an unusable file first
    if model.device != PRICED:
        model_folder(model)
    tokenizer_folder(model)
