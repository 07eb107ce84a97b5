"""Write docs/reference/cli.md from the options of the commands: `python .ci/cli_reference.py`."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from roseinfer.cli.commands import COMMANDS, Command, add_arguments  # noqa: E402
from roseinfer.config.options import Group, Option  # noqa: E402
from roseinfer.config.parser import OptionParser  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "cli.md"
HEAD = """# Commands and their options

Look up the commands of `roseinfer` and every option with its default. [Commands for the
terminal](../how-to/terminal.md) and [Run a server](../how-to/serve.md) explain how to use them. `roseinfer COMMAND
--help` prints the options of one command; if it shows only the common ones, `--help=all` prints all.

Every option `--some-name` is the key `some_name` of the file that `--config` names (TOML, JSON or YAML); a flag
overrides the file. Sizes may be written `8k` (8,000) or `8K` (8,192). `serve`, `engine` and `deploy` know [vLLM's
options](../from-vllm.md#options), too.

This page is written by `.ci/cli_reference.py`.
"""
Kind = type[Any]


def page() -> str:
    """Return the page: a table of commands, then a table of each group of options."""
    sections = [f"## {title}\n{_users(users)}\n\n{_table(users)}" for title, users in _sections()]
    return "\n\n".join([HEAD + "\n" + _commands(), *sections]) + "\n"


def _commands() -> str:
    titles = {group.kind: title for title, users in _sections() for _, group in users}
    rows = ["## Commands", "| command | does | options |", "| --- | --- | --- |"]
    for command in COMMANDS:
        own = [f"`{name}`: {help}" for name, help in _own_arguments(command)]
        names = dict.fromkeys(titles[group.kind] for group in command.OPTIONS.groups)
        groups = [", ".join(f"[{name}](#{_anchor(name)})" for name in names)] if names else []
        rows.append(f"| `roseinfer {command.NAME}` | {_cell(command.HELP)} | {'; '.join([*own, *groups])} |")
    return "\n".join(rows)


def _sections() -> list[tuple[str, list[tuple[Command, Group]]]]:
    """Return the title of each group of options, with the commands that have it."""
    users: dict[Kind, list[tuple[Command, Group]]] = {}
    for command in COMMANDS:
        for group in command.OPTIONS.groups:
            users.setdefault(group.kind, []).append((command, group))
    titles: dict[str, list[tuple[Command, Group]]] = {}
    for found in users.values():
        title = found[0][1].title.partition(" (")[0]
        title = title[0].upper() + title[1:]
        if title in titles:
            title += f": {found[0][0].NAME}"
        titles[title] = found
    return list(titles.items())


def _users(users: Sequence[tuple[Command, Group]]) -> str:
    note = users[0][1].title.partition(" (")[2].removesuffix(")")
    return f"Of {', '.join(f'`{command.NAME}`' for command, _ in users)}." + (f" Note: {_cell(note)}." if note else "")


def _table(users: Sequence[tuple[Command, Group]]) -> str:
    rows: dict[str, list[tuple[Command, Option]]] = {}
    for command, group in users:
        for option in group.options():
            rows.setdefault(option.name, []).append((command, option))
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for found in rows.values():
        option = found[0][1]
        only = f" (`{'`, `'.join(c.NAME for c, _ in found)}` only)" if len(found) < len(users) else ""
        lines.append(f"| {_flags(option)} | {_default(found)} | {_cell(option.help)}{only} |")
    return "\n".join(lines)


def _flags(option: Option) -> str:
    if option.type is bool:
        return f"`{option.flag}`, `{option.flag.replace('--', '--no-', 1)}`"
    value = "|".join(option.choices) if option.choices else option.metavar or option.type.__name__.upper()
    values = {"INT": "N", "FLOAT": "X", "STR": "TEXT"}
    return ", ".join(f"`{flag} {values.get(value, value)}`".replace("|", "\\|") for flag in option.flags)


def _default(found: Sequence[tuple[Command, Option]]) -> str:
    """Return the default of most commands, and those of the others by name."""
    shown = [(command.NAME, _shown(option.default)) for command, option in found]
    usual = max(dict.fromkeys(value for _, value in shown), key=[value for _, value in shown].count)
    others = [f"`{name}`: {value or 'none'}" for name, value in shown if value != usual]
    return "; ".join([usual, *others] if usual or not others else ["none", *others])


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, bool):
        return "on" if default else "off"
    if default in (None, (), ""):
        return ""
    return f"`{default:,}`" if isinstance(default, int) and default >= 10_000 else f"`{default}`"


def _own_arguments(command: Command) -> Iterator[tuple[str, str]]:
    """Yield arguments that are no options of a dataclass."""
    parser = OptionParser(prog="roseinfer")
    add_arguments(command, parser)
    known = {*command.OPTIONS.options, "help", "config_file"}
    for action in parser._actions:
        positional = action.dest.removesuffix("_positional")
        if action.help is argparse.SUPPRESS or action.dest in known or positional in known:
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        if not str(name).isupper():
            yield name, _cell(action.help or "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%").replace("<", "&lt;").replace("*", "\\*")


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower() if c.isalnum() or c in " -_").replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
