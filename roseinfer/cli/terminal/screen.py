"""Output of a conversation: a terminal with colours and whole words, or a file with the answers only."""

import re
import sys
from typing import TextIO

from roseinfer.cli.terminal.word_wrap import WordWrap

_DIM, _RED, _BOLD, _OFF = "\x1b[2m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
# A model may write control characters, which terminals obey; newlines and tabs stay.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return the text without control characters."""
    return _CONTROLS.sub("", text)


class Screen:
    """Output of one conversation. `plain`: not a terminal, so answers only; notes go to standard error."""

    def __init__(self, out: TextIO | None = None, errors: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._errors = errors or sys.stderr
        self.plain = not self._out.isatty()
        self._thinking = False
        self._in_line = False
        self._wrapped = WordWrap()

    def stats_wanted(self, asked: bool | None) -> bool:
        """True if answers are followed by a line of figures: by default on a terminal."""
        return not self.plain if asked is None else asked

    def piece(self, text: str, *, thought: bool) -> None:
        """Write a part of an answer. Reasoning is dim, and left out of plain output."""
        if self.plain:
            if not thought:
                self._write(text)
            return
        text = printable(text)
        if thought != self._thinking:
            self._write(_DIM if thought else f"{_OFF}\n\n")
            self._wrapped.reset()
            self._thinking = thought
        self._write(self._wrapped(text))

    def end(self) -> None:
        """End an answer: start a new line."""
        if self._thinking:
            self._write(_OFF)
            self._thinking = False
        if self._in_line:
            self._write("\n")
        self._wrapped.reset()

    def note(self, text: str) -> None:
        """Write a dim note of the program; to standard error if plain."""
        self._say(text, _DIM)

    def error(self, text: str) -> None:
        self._say(text, _RED)

    def _say(self, text: str, style: str) -> None:
        self.end()
        if self.plain:
            print(text, file=self._errors, flush=True)
        else:
            self._write(f"{style}{printable(text)}{_OFF}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        if text not in (_DIM, _OFF) and text:
            self._in_line = not text.endswith("\n")
