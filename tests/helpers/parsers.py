"""A parser for outputs that are easy to write: `(thinking)`, `[name|arguments]` for a call, all else is text."""

from collections.abc import Callable

from roseinfer.text.output import CallArguments, CallEnd, CallStart, Event, OutputParser, Reasoning, Text


class BracketParser:
    """`markers` are special tokens that it wants to see: they come out as text in angle brackets."""

    def __init__(self, markers: frozenset[int] = frozenset()) -> None:
        self.markers = markers
        self.reasoning_tokens = 0
        self.failures = 0
        self.fed: list[tuple[str, int | None]] = []
        self._mode = "text"
        self._name = ""
        self._calls = 0

    def feed(self, text: str, token_id: int | None) -> list[Event]:
        self.fed.append((text, token_id))
        self.reasoning_tokens += self._mode == "thinking" or text == "("
        return [event for char in text for event in self._char(char)]

    def end(self) -> list[Event]:
        if self._mode in ("name", "arguments"):
            self.failures += 1
        return [CallEnd(self._calls - 1, complete=False)] if self._mode == "arguments" else []

    def _char(self, char: str) -> list[Event]:
        if self._mode == "text" and char in "([":
            self._mode, self._name = {"(": "thinking", "[": "name"}[char], ""
            return []
        if self._mode == "text":
            return [Text(char)]
        if self._mode == "thinking":
            self._mode = "text" if char == ")" else "thinking"
            return [] if char == ")" else [Reasoning(char)]
        return self._char_of_call(char)

    def _char_of_call(self, char: str) -> list[Event]:
        if self._mode == "name":
            if char != "|":
                self._name += char
                return []
            self._mode, self._calls = "arguments", self._calls + 1
            return [CallStart(self._calls - 1, f"call_{self._calls - 1}", self._name)]
        if char != "]":
            return [CallArguments(self._calls - 1, char)]
        self._mode = "text"
        return [CallEnd(self._calls - 1)]


def bracket_parser(markers: frozenset[int] = frozenset()) -> Callable[[], OutputParser]:
    return lambda: BracketParser(markers)
