"""Commands within a conversation: `/system`, `/slo`, `/help`..."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from roseinfer.cli.terminal.conversation import Conversation
from roseinfer.cli.terminal.objectives import parse_objectives, shown_objectives
from roseinfer.cli.terminal.sampling import parse_params, shown_params
from roseinfer.cli.terminal.screen import Screen
from roseinfer.core.errors import ConfigError


class Leave(Exception):
    """The user ends the conversation."""


class CommandTarget(Protocol):
    """Interface of `Chat` for commands. `unanswered`: the last question without an answer."""

    conversation: Conversation
    screen: Screen
    stats: bool
    last: str | None
    unanswered: str | None


def _system(talk: CommandTarget, rest: str) -> str | None:
    if rest:
        talk.conversation.system = None if rest == "off" else rest
    shown = talk.conversation.system
    talk.screen.note("no system message" if shown is None else f"system message: {shown}")
    return None


def _slo(talk: CommandTarget, rest: str) -> str | None:
    if rest:
        talk.conversation.slo = parse_objectives(rest)
    shown = shown_objectives(talk.conversation.slo)
    talk.screen.note(f"objectives: {shown}" if shown else "no objectives")
    return None


def _params(talk: CommandTarget, rest: str) -> str | None:
    if rest == "off":
        talk.conversation.params.clear()
    else:
        talk.conversation.params |= parse_params(rest)
    talk.screen.note(shown_params(talk.conversation.params) or "sampling as the server decides")
    return None


def _clear(talk: CommandTarget, rest: str) -> str | None:
    talk.conversation.messages.clear()
    talk.unanswered = None
    talk.screen.note("the conversation is empty")
    return None


def _retry(talk: CommandTarget, rest: str) -> str | None:
    question = talk.unanswered or talk.conversation.remove_last()
    if question is None:
        raise ConfigError("no question to repeat")
    return question


def _save(talk: CommandTarget, rest: str) -> str | None:
    if not rest:
        raise ConfigError("/save requires a file name")
    path = Path(rest).expanduser()
    talk.conversation.save(path)
    talk.screen.note(f"{len(talk.conversation.messages)} messages written to {path}")
    return None


def _stats(talk: CommandTarget, rest: str) -> str | None:
    if rest not in ("", "on", "off"):
        raise ConfigError("usage: /stats on|off")
    talk.stats = rest == "on" or (talk.stats and rest == "")
    talk.screen.note(talk.last or "no answer yet")
    return None


def _help(talk: CommandTarget, rest: str) -> str | None:
    shown = {f"/{name} {command.takes}".rstrip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, shown))
    for name, text in shown.items():
        talk.screen.note(f"{name.ljust(width)}  {text}")
    talk.screen.note('Ctrl+C stops an answer, Ctrl+D quits; """ starts and ends several lines')
    return None


def _leave(talk: CommandTarget, rest: str) -> str | None:
    raise Leave


class SlashCommand(NamedTuple):
    """One command. `run` may return a question to ask at once."""

    run: Callable[[CommandTarget, str], str | None]
    takes: str
    help: str


COMMANDS: Mapping[str, SlashCommand] = {
    "help": SlashCommand(_help, "", "show this list"),
    "system": SlashCommand(_system, "[TEXT | off]", "show or set the system message"),
    "slo": SlashCommand(_slo, "[ttft=200ms ... | off]", "show or set the latency objectives"),
    "params": SlashCommand(_params, "[top_p=0.9 ... | off]", "show or set the sampling; off: the server's"),
    "clear": SlashCommand(_clear, "", "start over; keep system message and objectives"),
    "retry": SlashCommand(_retry, "", "ask the last question again"),
    "save": SlashCommand(_save, "FILE", "write the conversation as a request in JSON"),
    "stats": SlashCommand(_stats, "[on | off]", "show the last answer's figures; on: after each"),
    "quit": SlashCommand(_leave, "", "leave"),
}


def run_command(talk: CommandTarget, line: str) -> str | None:
    """Run a line that starts with a slash. Return a question to ask at once, if any.

    Raises `Leave`, and `ConfigError` for invalid commands.
    """
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get({"exit": "quit", "bye": "quit", "?": "help"}.get(name, name))
    if command is None:
        raise ConfigError(f"unknown command /{name} (/help lists all)")
    return command.run(talk, rest.strip())
