"""Lines of a streamed text broken between words."""

import shutil
import unicodedata
from collections.abc import Callable

FENCE = "```"


def terminal_columns() -> int:
    """Return the columns to fill. The last one stays empty: a cursor behind it behaves differently in each terminal."""
    return max(shutil.get_terminal_size().columns - 1, 1)


class WordWrap:
    """Text for a terminal, character by character and without delay: a word that outgrows its line moves to the next.

    Fenced code is left to the terminal, and so are words of more than half a line.
    """

    def __init__(self, columns: Callable[[], int] = terminal_columns) -> None:
        self._columns = columns
        self.reset()

    def reset(self) -> None:
        """Begin a new text in the first column."""
        self._column = 0
        self._word = self._line = ""
        self._code = False

    def __call__(self, text: str) -> str:
        columns = self._columns()
        return "".join([self._next(char, columns) for char in text])

    def _next(self, char: str, columns: int) -> str:
        if char == "\n":
            self._code ^= self._line.lstrip().startswith(FENCE)
            self._column, self._word, self._line = 0, "", ""
            return char
        self._line += char
        if self._code:
            return char
        cells = _cells(char)
        if self._column + cells <= columns:
            self._column += cells
            self._word = "" if char == " " else self._word + char
            return char
        return self._break(char, cells, columns)

    def _break(self, char: str, cells: int, columns: int) -> str:
        """Return what begins a new line with `char`, which does not fit on this one."""
        word, self._word = self._word, ""
        if char == " ":
            self._column = 0
            return "\n"
        width = sum(map(_cells, word))
        if not word or 2 * width > columns:
            self._word, self._column = char, cells
            return f"\n{char}"
        self._word, self._column = word + char, width + cells
        return f"\x1b[{width}D\x1b[K\n{word}{char}"


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
