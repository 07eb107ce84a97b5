"""roseinfer top: live overview of a running server."""

import json
import sys
import time
from argparse import Namespace
from importlib.util import find_spec

from roseinfer.cli.terminal.config import TopConfig
from roseinfer.cli.terminal.remote import Remote, given_key
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.errors import ConfigError
from roseinfer.core.extras import install_command

NAME = "top"
HELP = "show promises, engines and the slowest requests of a running server"
OPTIONS = OptionSet(Group(TopConfig, "view", positional="url"))
TIMEOUT_S = 10.0


def run(args: Namespace) -> int:
    config = OPTIONS.build(TopConfig, OPTIONS.read(args))
    remote = Remote(config.url, given_key(config.api_key), TIMEOUT_S)
    if config.once:
        return _once(remote, config)
    if find_spec("rich") is None:
        raise ConfigError(f"the live view requires rich ({install_command('terminal')}); --once does not")
    if not sys.stdout.isatty():
        raise ConfigError("the live view requires a terminal; --once does not")

    from roseinfer.cli.terminal.top_screen import watch

    watch(remote, config.interval, config.slowest)
    return 0


def _once(remote: Remote, config: TopConfig) -> int:
    from roseinfer.cli.terminal.metrics import Window
    from roseinfer.cli.terminal.overview import overview, records_of, scrape
    from roseinfer.cli.terminal.top_text import as_text

    before = scrape(remote)
    time.sleep(config.interval)
    view = overview(Window(before, scrape(remote)), records_of(remote), config.slowest, time.time())
    view = {"url": remote.url, "at": time.time(), **view}
    print(json.dumps(view, indent=2) if config.json else as_text(view))
    return 0
