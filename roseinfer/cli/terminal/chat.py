"""The conversation at a terminal: questions, commands, answers as they stream."""

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from roseinfer.cli.terminal.answer import Answer, Asking, describe
from roseinfer.cli.terminal.conversation import Conversation
from roseinfer.cli.terminal.refusals import advice
from roseinfer.cli.terminal.remote import RefusedError, Remote, RemoteError, UnreachableError
from roseinfer.cli.terminal.screen import Screen
from roseinfer.cli.terminal.slash import COMMANDS, Leave, run_command
from roseinfer.core.errors import ConfigError

PROMPT = "> "
BLOCK = '"""'  # begins and ends a question of several lines
PATH = "/v1/chat/completions"


class Chat:
    """Asks `remote` and shows its answers. `stats`: a line with tokens and times behind each."""

    def __init__(self, remote: Remote, conversation: Conversation, screen: Screen, *, stats: bool) -> None:
        self.remote = remote
        self.conversation = conversation
        self.screen = screen
        self.stats = stats
        self.last: str | None = None  # the line of the newest answer
        self.unanswered: str | None = None
        self.lost = False  # the connection, at the last question

    def ask(self, question: str, *, once: bool = False) -> bool:
        """One turn; whether there is an answer, if only a part of one. Ctrl+C ends it with what there is. `once`: it is
        the only one."""
        self.conversation.ask(question)
        asking = Asking(self.remote, PATH, self.conversation.body())
        outcome = stream_to(self.screen, asking)
        self.unanswered = question if outcome.nothing else None
        self.lost = isinstance(outcome.error, UnreachableError)
        if outcome.nothing:
            self.conversation.take_back()
        else:
            self.conversation.answered(asking.answer.text)
            self.last = tell(self.screen, asking.answer, self.conversation.slo, stats=self.stats)
        explain(self.screen, outcome, once=once)
        return outcome.error is None

    def converse(self, check: Callable[[bool], None] = lambda lost: None) -> None:
        """Reads questions and commands until the input ends. `check` is called before each with whether the connection
        was lost in the one before, and may raise. Ctrl+C interrupts from now on, even where it was ignored.
        """
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script has put into the background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _edit_lines()
        while True:
            try:
                check(self.lost)
                self._turn(_read())
            except KeyboardInterrupt:
                self.screen.note("\nCtrl+D leaves")
            except EOFError:
                self.screen.note("")
                return
            except Leave:
                return

    def _turn(self, line: str) -> None:
        question: str | None = line
        if line.startswith("/"):
            try:
                question = run_command(self, line)
            except ConfigError as error:
                self.screen.complaint(str(error))
                return
        if question is not None and question.strip():
            self.ask(question)


class Outcome(NamedTuple):
    """How the reading of an answer ended. `nothing`: before its first token."""

    nothing: bool = False
    stopped: bool = False
    error: RemoteError | None = None


def stream_to(screen: Screen, asking: Asking) -> Outcome:
    """Shows an answer as it comes. Ctrl+C ends it, at the server too."""
    error, stopped = None, False
    try:
        for piece in asking:
            screen.piece(piece.text, thought=piece.thought)
    except KeyboardInterrupt:
        stopped = True
    except RemoteError as raised:
        error = raised
    screen.end()
    return Outcome(asking.answer.first_s is None and (stopped or error is not None), stopped, error)


def tell(screen: Screen, answer: Answer, promised: Mapping[str, Any], *, stats: bool) -> str:
    """What is known of an answer: a line if `stats` are wanted, which is returned; and why a promise was broken."""
    line = describe(answer, promised)
    if stats:
        screen.note(line)
    why = answer.slo.get("why") or {}
    if answer.slo.get("met") is False and why.get("summary"):
        screen.note(str(why["summary"]))
    return line


def explain(screen: Screen, outcome: Outcome, *, once: bool) -> None:
    """Why there is no more of it, and what to do about that. `once`: nothing can be typed any more."""
    if outcome.stopped:
        screen.note("stopped")
    if outcome.error is None:
        return
    screen.complaint(str(outcome.error))
    if isinstance(outcome.error, RefusedError):
        for line in advice(outcome.error, once=once):
            screen.note(line)


def _read() -> str:
    """A line, or several between two lines that hold `\"\"\"`. Raises `EOFError` when the input ends."""
    line = input(PROMPT)
    if not line.startswith(BLOCK):
        return line
    lines = [line[len(BLOCK) :]]
    while not lines[-1].endswith(BLOCK):
        lines.append(input())
    lines[-1] = lines[-1][: -len(BLOCK)]
    return "\n".join(lines).strip("\n")


def _edit_lines() -> None:
    """Arrow keys, earlier lines, and commands completed by tab, where the terminal's library is there."""
    with suppress(ImportError):
        import readline

        def complete(text: str, state: int) -> str | None:
            found = [f"/{name}" for name in COMMANDS if f"/{name}".startswith(text)]
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")


def model_of(remote: Remote, name: str | None) -> str:
    """The model to ask for: `name`, else the first that is served. Raises `ConfigError` if there is none."""
    if name is not None:
        return name
    served = remote.models()
    if not served:
        raise ConfigError(f"{remote.url} names no model: say which with model_name")
    return served[0]


def piped() -> str | None:
    """What comes by standard input if that is no terminal, without the end of its last line. Raises `ConfigError` for
    what is no text.
    """
    return None if sys.stdin.isatty() else read_all().removesuffix("\n")


def read_all() -> str:
    """Standard input to its end. Raises `ConfigError` for what is no text."""
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales what is no text comes as lone surrogates
    except UnicodeError:
        raise ConfigError("standard input is no text in UTF-8") from None
    return text
