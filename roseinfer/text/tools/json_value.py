"""Incremental search for the end of a JSON value: it follows brackets and strings, and reads nothing twice."""

import re

PLAIN = re.compile(r'[^"\\]+')
SPACE = re.compile(r"[ \t\r\n]+")
WORD = re.compile(r"[a-z]+")
WORDS = ("true", "false", "null")
DIGITS = re.compile(r"[0-9]+")
# Numbers: state, then kind of character, then next state. States in ENOUGH are complete numbers.
NUMBER = {
    "-": {"0": "0", "d": "int"},
    "0": {".": ".", "e": "e"},
    "int": {"0": "int", "d": "int", ".": ".", "e": "e"},
    ".": {"0": "frac", "d": "frac"},
    "frac": {"0": "frac", "d": "frac", "e": "e"},
    "e": {"0": "exp", "d": "exp", "+": "e+", "-": "e+"},
    "e+": {"0": "exp", "d": "exp"},
    "exp": {"0": "exp", "d": "exp"},
}
ENOUGH = frozenset({"0", "int", "frac", "exp"})
CLOSER = {"{": "}", "[": "]"}


class JsonValue:
    """Scanner of one JSON value. `done`: it is complete; `failed`: the text is not JSON.

    Strings pass unchanged: a bare line break or an unknown escape in one does not fail.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []  # brackets
        self._expects = "value"  # value, first (or the end), key, first key (or the end), colon, comma
        self._within = ""  # a string, escape, number or word
        self._so_far = ""  # part of a word, or the state of a number

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at`. Return the end of the text, of the value, or where it stops being JSON."""
        end = len(text)
        while at < end and not self.done and not self.failed:
            if self._within:
                at = self._go_on(text, at)
            elif (space := SPACE.match(text, at)) is not None:
                at = space.end()
            else:
                at += self._begin(text[at])
        return at

    def within_string(self, text: str) -> str | None:
        """Return the text if all of it is within a string, which changes no state. Otherwise return None without
        reading it.
        """
        plain = self._within == "string" and '"' not in text and "\\" not in text
        return text if plain else None

    def end(self) -> None:
        """End the text, which completes a number."""
        if self._within == "number" and not self._open and self._so_far in ENOUGH:
            self.done = True

    def _go_on(self, text: str, at: int) -> int:
        if self._within == "string":
            return self._string(text, at)
        if self._within == "escape":
            self._within = "string"
            return at + 1
        return self._number(text, at) if self._within == "number" else self._word(text, at)

    def _string(self, text: str, at: int) -> int:
        plain = PLAIN.match(text, at)
        if plain is not None:
            return plain.end()
        if text[at] == "\\":
            self._within = "escape"
        else:
            self._within = ""
            self._said("key" in self._expects)
        return at + 1

    def _number(self, text: str, at: int) -> int:
        char = text[at]
        kind = "d" if "1" <= char <= "9" else "e" if char in "eE" else char
        after = NUMBER[self._so_far].get(kind)
        if after is not None:
            self._so_far = after
            digits = DIGITS.match(text, at + 1) if after in ("int", "frac", "exp") else None
            return at + 1 if digits is None else digits.end()
        if self._so_far not in ENOUGH:
            self.failed = True
            return at
        self._within = ""
        self._said()
        return at

    def _word(self, text: str, at: int) -> int:
        word = WORD.match(text, at)
        self._so_far += word[0] if word else ""
        if len(self._so_far) > 5 or not any(known.startswith(self._so_far) for known in WORDS) or word is None:
            self.failed = True
            return at
        if self._so_far in WORDS:
            self._within = ""
            self._said()
        return word.end()

    def _begin(self, char: str) -> int:
        """Read a character outside of white space, strings, numbers and words. Return how many were taken."""
        expects = self._expects
        if expects == "comma":
            return self._comma_or_end(char)
        if expects == "colon":
            self._expects = "value"
            return self._check(char == ":")
        if "first" in expects and char == CLOSER[self._open[-1]]:
            self._open.pop()
            self._said()
            return 1
        if char == '"':
            self._within = "string"
            return 1
        return self._check("key" not in expects and self._begin_value(char))

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self._expects = "first key" if char == "{" else "first"
        elif char == "-" or "0" <= char <= "9":
            self._within, self._so_far = "number", char if char in "-0" else "int"
        elif char in "tfn":
            self._within, self._so_far = "word", char
        else:
            return False
        return True

    def _comma_or_end(self, char: str) -> int:
        if char == ",":
            self._expects = "key" if self._open[-1] == "{" else "value"
            return 1
        if char == CLOSER[self._open[-1]]:
            self._open.pop()
            self._said()
            return 1
        return self._check(False)

    def _check(self, fits: bool) -> int:
        self.failed = not fits
        return int(fits)

    def _said(self, key: bool = False) -> None:
        """Complete a value or a key."""
        self._expects = "colon" if key else "comma"
        self.done = not self._open
