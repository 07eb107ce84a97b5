"""Commands within a conversation: `/system`, `/slo`, `/help`..."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from roseinfer.cli.terminal.conversation import Conversation
from roseinfer.cli.terminal.objectives import parse_objectives, shown_objectives
from roseinfer.cli.terminal.screen import Screen
from roseinfer.core.errors import ConfigError


class Leave(Exception):
    """The user ends the conversation."""


class Talk(Protocol):
    """Interface of `Chat` for commands. `unanswered`: the last question without an answer."""

    conversation: Conversation
    screen: Screen
    stats: bool
    last: str | None
    unanswered: str | None


def _system(talk: Talk, rest: str) -> str | None:
    if rest:
        talk.conversation.system = None if rest == "off" else rest
    shown = talk.conversation.system
    talk.screen.note("no system message" if shown is None else f"system message: {shown}")
    return None


def _slo(talk: Talk, rest: str) -> str | None:
    if rest:
        talk.conversation.slo = parse_objectives(rest)
    shown = shown_objectives(talk.conversation.slo)
    talk.screen.note(f"objectives: {shown}" if shown else "no objectives")
    return None


def _clear(talk: Talk, rest: str) -> str | None:
    talk.conversation.messages.clear()
    talk.unanswered = None
    talk.screen.note("the conversation is empty")
    return None


def _retry(talk: Talk, rest: str) -> str | None:
    question = talk.unanswered or talk.conversation.take_back()
    if question is None:
        raise ConfigError("there is no question to ask again")
    return question


def _save(talk: Talk, rest: str) -> str | None:
    if not rest:
        raise ConfigError("/save needs the name of a file")
    path = Path(rest).expanduser()
    talk.conversation.save(path)
    talk.screen.note(f"{len(talk.conversation.messages)} messages are in {path}")
    return None


def _stats(talk: Talk, rest: str) -> str | None:
    if rest not in ("", "on", "off"):
        raise ConfigError("/stats is on or off")
    talk.stats = rest == "on" or (talk.stats and rest == "")
    talk.screen.note(talk.last or "no answer yet")
    return None


def _help(talk: Talk, rest: str) -> str | None:
    shown = {f"/{name} {command.takes}".rstrip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, shown))
    for name, text in shown.items():
        talk.screen.note(f"{name.ljust(width)}  {text}")
    talk.screen.note('Ctrl+C stops an answer, Ctrl+D leaves; """ begins and ends a question of several lines')
    return None


def _leave(talk: Talk, rest: str) -> str | None:
    raise Leave


class Command(NamedTuple):
    """One command. `run` may return a question to ask at once."""

    run: Callable[[Talk, str], str | None]
    takes: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "help": Command(_help, "", "this list"),
    "system": Command(_system, "[TEXT | off]", "show or set the system message"),
    "slo": Command(_slo, "[ttft=200ms tpot=30ms e2e=5s class=chat | off]", "show or set the latency objectives"),
    "clear": Command(_clear, "", "begin anew; system message and objectives stay"),
    "retry": Command(_retry, "", "ask the last question again"),
    "save": Command(_save, "FILE", "write the conversation as a request in JSON"),
    "stats": Command(_stats, "[on | off]", "tokens and times of the last answer; on: behind each"),
    "quit": Command(_leave, "", "leave"),
}


def run_command(talk: Talk, line: str) -> str | None:
    """Run a line that starts with a slash. Return a question to ask at once, if any.

    Raises `Leave`, and `ConfigError` for invalid commands.
    """
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get({"exit": "quit", "bye": "quit", "?": "help"}.get(name, name))
    if command is None:
        raise ConfigError(f"there is no command /{name}: /help lists them")
    return command.run(talk, rest.strip())
