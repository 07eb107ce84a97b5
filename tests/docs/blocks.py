"""Fenced blocks of the pages that users follow: README.md and docs/, except research.

A comment before a block says what a test does with it: `<!-- not run: REASON -->`, or `<!-- expect: STATUS -->` if its
request is answered with an error. Readers do not see the comment.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>not run|expect): (?P<value>[^\n]+?) -->\n\s*)?"
    r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
# Words that may precede a command: a prompt, variables.
PREFIX = re.compile(r"\$|[A-Z_]+=.*")


@dataclass(frozen=True, slots=True)
class Block:
    """`place`: page and line. `mark`, `value`: of the comment before it, else empty."""

    place: str
    language: str
    text: str
    mark: str
    value: str

    @property
    def page(self) -> str:
        return self.place.partition(":")[0]


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "research" not in path.relative_to(ROOT).parts),
    ]


def blocks() -> Iterator[Block]:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("language")) + 1
            place = f"{page.relative_to(ROOT)}:{line}"
            yield Block(place, match["language"], match["text"], match["mark"] or "", match["value"] or "")


def commands(block: Block) -> Iterator[list[str]]:
    """Return the words of each `roseinfer` and `curl` command, without variables before and redirections after it."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    for words in _split(re.sub(r"(^|\s)#\s.*$", "", text, flags=re.MULTILINE)):
        while words and PREFIX.fullmatch(words[0]):
            words = words[1:]
        if words and words[0].rpartition("/")[2] in ("roseinfer", "curl"):
            yield [words[0].rpartition("/")[2], *words[1:]]


def _split(text: str) -> Iterator[list[str]]:
    """Split at line ends and operators of a shell, except in quotes."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;&|<>()")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set("\n;&|<>()"):
                yield words
                words = []
            else:
                words.append(word)
    except ValueError:  # an apostrophe in text: not a block of commands
        return
    yield words
