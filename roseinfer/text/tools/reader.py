"""A sample's text as it comes, for parsers that are written as if all of it were there.

A parser is a generator that asks the reader for characters and waits (`yield`) where none has come yet. So it keeps its
place between two pieces of text, nothing is read twice, and the outcome does not depend on how the text is cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
# What a parser's methods are: they wait by yielding, and return a result.
Steps = Generator[None, None, Result]
SPACE = re.compile(r"[ \t\r\n]+")


class TextReader:
    """`more`, `peek` and so on wait for text; at the end of the output they say that there is none.

    `letters`: a mark that is one token may be spelled out in the text at hand, as its tokens are unknown. `mark`: where
    in the text at hand such a token begins, -1 if there is none.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.letters = True
        self.mark = -1
        self._kept: list[str] | None = None

    def give(self, text: str, letters: bool, mark: int = -1) -> None:
        """More text. All that was given before has been read."""
        self.text, self.at, self.letters, self.mark = text, 0, letters, mark

    # --- waiting -------------------------------------------------------------------------------------------------
    def more(self) -> Steps[bool]:
        """Whether there is another character."""
        while self.at == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, "" at the end."""
        there = yield from self.more()
        return self.text[self.at] if there else ""

    def run(self, pattern: re.Pattern[str], sink: Callable[[str], object] | None = None) -> Steps[str]:
        """Take characters as long as `pattern` (of characters, repeated) matches; `sink` gets them as they come.

        Returns all of them if there is no sink.
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
        """Take white space, however much."""
        return (yield from self.run(SPACE))

    def one_of(self, words: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """Take one of `words`, none of which begins another: (the word or "", all that was taken)."""
        taken = ""
        while taken not in words:
            char = yield from self.peek()
            if not char or not any(word.startswith(taken + char) for word in words):
                return "", taken
            taken += self.take(1)
        return taken, taken

    # --- taking --------------------------------------------------------------------------------------------------
    def take(self, count: int) -> str:
        """The next `count` characters of the text at hand."""
        taken = self.text[self.at : self.at + count]
        self.at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def rest(self) -> str:
        return self.take(len(self.text) - self.at)

    def keep(self, text: str) -> None:
        """From now on remember what is taken, `text` before it: it may have to be given back."""
        self._kept = [text]

    def forget(self) -> None:
        self._kept = None

    def kept(self) -> str:
        """What was remembered, which is then forgotten."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept
