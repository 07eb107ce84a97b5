"""Reader of a sample's text as it arrives, for parsers written as if all text were available.

A parser is a generator that asks the reader for characters and waits (`yield`) until they come. So it keeps its
position between two pieces of text, reads nothing twice, and does not depend on how the text is split.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
# Methods of a parser: they wait by yielding, and return a result.
Steps = Generator[None, None, Result]
SPACE = re.compile(r"[ \t\r\n]+")


class TextReader:
    """Text of one sample. `more`, `peek` and others wait for text, and report its end.

    letters: the tokens of the available text are unknown, so a mark that is a token may be spelled out. mark: where
    such a token begins in the available text, -1 if nowhere.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.letters = True
        self.mark = -1
        self._kept: list[str] | None = None

    def give(self, text: str, letters: bool, mark: int = -1) -> None:
        """Add text. All earlier text must have been read."""
        self.text, self.at, self.letters, self.mark = text, 0, letters, mark

    # --- waiting -------------------------------------------------------------------------------------------------
    def more(self) -> Steps[bool]:
        """Return True if there is another character."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        there = yield from self.more()
        return self.text[self.at] if there else ""

    def run(self, pattern: re.Pattern[str], sink: Callable[[str], object] | None = None) -> Steps[str]:
        """Take characters while `pattern` (of characters, repeated) matches; `sink` gets them as they arrive.

        Return all of them if there is no sink.
        """
        found: list[str] = []
        while (yield from self.more()):
            match = pattern.match(self.text, self.at)
            if match is None:
                break
            (sink or found.append)(self.take(match.end() - self.at))
            if self.at < len(self.text):
                break
        return "".join(found)

    def space(self) -> Steps[str]:
        """Take all white space."""
        return (yield from self.run(SPACE))

    def one_of(self, words: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """Take one of `words`, none of which begins another. Return the word or "", and all that was taken."""
        taken = ""
        while taken not in words:
            char = yield from self.peek()
            if not char or not any(word.startswith(taken + char) for word in words):
                return "", taken
            taken += self.take(1)
        return taken, taken

    # --- taking --------------------------------------------------------------------------------------------------
    def take(self, count: int) -> str:
        """Take the next `count` characters of the available text."""
        taken = self.text[self.at : self.at + count]
        self.at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def rest(self) -> str:
        return self.take(len(self.text) - self.at)

    def keep(self, text: str) -> None:
        """Record what is taken from now on, after `text`, since it may have to be given back."""
        self._kept = [text]

    def forget(self) -> None:
        self._kept = None

    def kept(self) -> str:
        """Return what was recorded, and forget it."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept
