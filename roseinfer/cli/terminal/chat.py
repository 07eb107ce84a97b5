"""Conversation in a terminal: questions, commands and streamed answers."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from roseinfer.cli.terminal.answer import Answer, AnswerStream, describe
from roseinfer.cli.terminal.conversation import Conversation
from roseinfer.cli.terminal.refusals import advice
from roseinfer.cli.terminal.remote import RefusedError, Remote, RemoteError, UnreachableError
from roseinfer.cli.terminal.screen import Screen
from roseinfer.cli.terminal.slash import COMMANDS, Leave, run_command
from roseinfer.core.errors import ConfigError

PROMPT = "> "
BLOCK = '"""'  # starts and ends a question of several lines
PATH = "/v1/chat/completions"


class Chat:
    """Conversation with the server behind `remote`. `stats` adds a line with tokens and times after each answer."""

    def __init__(self, remote: Remote, conversation: Conversation, screen: Screen, *, stats: bool) -> None:
        self.remote = remote
        self.conversation = conversation
        self.screen = screen
        self.stats = stats
        self.last: str | None = None  # figures of the newest answer
        self.unanswered: str | None = None
        self.lost = False  # the last question lost the connection

    def ask(self, question: str, *, once: bool = False) -> bool:
        """Run one turn and return True if there is an answer, even a partial one. Ctrl+C stops it. `once`: the only
        turn.
        """
        self.conversation.ask(question)
        asking = AnswerStream(self.remote, PATH, self.conversation.body())
        outcome = stream_to(self.screen, asking)
        self.unanswered = question if outcome.nothing else None
        self.lost = isinstance(outcome.error, UnreachableError)
        if outcome.nothing:
            self.conversation.remove_last()
        else:
            self.conversation.answered(asking.answer.text)
            self.last = show_figures(self.screen, asking.answer, self.conversation.slo, stats=self.stats)
        explain(self.screen, outcome, once=once)
        return outcome.error is None

    def converse(self, check: Callable[[bool], None] = lambda lost: None) -> None:
        """Read questions and commands until the input ends.

        `check(lost)` runs before each one and may raise; `lost` is True if the previous one lost the connection. Ctrl+C
        interrupts from here on, even if it was ignored before.
        """
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for a script's background jobs
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _edit_lines()
        while True:
            try:
                check(self.lost)
                self._turn(_read())
            except KeyboardInterrupt:
                self.screen.note("\nCtrl+D quits")
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
                self.screen.error(str(error))
                return
        if question is not None and question.strip():
            self.ask(question)


class StreamEnd(NamedTuple):
    """End of reading an answer. `nothing`: before the first token."""

    nothing: bool = False
    stopped: bool = False
    error: RemoteError | None = None


def stream_to(screen: Screen, asking: AnswerStream) -> StreamEnd:
    """Show an answer while it streams. Ctrl+C stops it, on the server too."""
    error, stopped = None, False
    try:
        with _no_echo():
            for piece in asking:
                screen.piece(piece.text, thought=piece.thought)
    except KeyboardInterrupt:
        stopped = True
    except RemoteError as raised:
        error = raised
    screen.end()
    return StreamEnd(asking.answer.first_s is None and (stopped or error is not None), stopped, error)


@contextmanager
def _no_echo() -> Iterator[None]:
    """Hide what is typed meanwhile, if standard input is a terminal. It is the next input, which shows it.

    Ctrl+D is kept for the next input, too. As the end of a file it would be lost, since nothing reads now.
    """
    if not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    hidden = termios.tcgetattr(terminal)
    hidden[3] &= ~termios.ECHO
    hidden[6][termios.VEOF] = os.fpathconf(terminal, "PC_VDISABLE").to_bytes()
    termios.tcsetattr(terminal, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def show_figures(screen: Screen, answer: Answer, promised: Mapping[str, Any], *, stats: bool) -> str:
    """Show the figures of an answer if `stats` are on, and why a promise was broken. Return the line with the
    figures.
    """
    line = describe(answer, promised)
    if stats:
        screen.note(line)
    why = answer.slo.get("why") or {}
    if answer.slo.get("met") is False and why.get("summary"):
        screen.note(str(why["summary"]))
    return line


def explain(screen: Screen, outcome: StreamEnd, *, once: bool) -> None:
    """Show why an answer stopped and what to do. `once`: the user cannot type any more."""
    if outcome.stopped:
        screen.note("stopped")
    if outcome.error is None:
        return
    screen.error(str(outcome.error))
    if isinstance(outcome.error, RefusedError):
        for line in advice(outcome.error, once=once):
            screen.note(line)


def _read() -> str:
    """Read a line, or several lines between two `BLOCK`s. Raises `EOFError` at the end of the input."""
    line = input(PROMPT)
    if not line.startswith(BLOCK):
        return line
    lines = [line[len(BLOCK) :]]
    while not lines[-1].endswith(BLOCK):
        lines.append(input())
    lines[-1] = lines[-1][: -len(BLOCK)]
    return "\n".join(lines).strip("\n")


def _edit_lines() -> None:
    """Enable arrow keys, history and tab completion of commands, if readline is available."""
    with suppress(ImportError):
        import readline

        def complete(text: str, state: int) -> str | None:
            found = [f"/{name}" for name in COMMANDS if f"/{name}".startswith(text)]
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")


def piped() -> str | None:
    """Return the text on standard input without its last newline; None for a terminal. Raises `ConfigError` for bytes
    that are not text.
    """
    return None if sys.stdin.isatty() else read_all().removesuffix("\n")


def read_all() -> str:
    """Read standard input to its end. Raises `ConfigError` for bytes that are not text."""
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales, invalid bytes become lone surrogates
    except UnicodeError:
        raise ConfigError("standard input is not UTF-8 text") from None
    return text
