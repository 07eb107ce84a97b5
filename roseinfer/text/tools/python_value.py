"""Incremental conversion of Python literals to JSON, without evaluation."""

import re
from collections.abc import Callable
from json.encoder import encode_basestring

from roseinfer.text.tools.base import MalformedCall, next_char
from roseinfer.text.tools.reader import Steps, TextReader

MAX_DEPTH = 32
WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
WORD = re.compile(r"[\w.]+")
IDENTIFIERS = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
NUMBER_CHARS = re.compile(r"[\w.+-]+")
NUMBER = re.compile(r"[+-]?(?:(?P<whole>0|[1-9][0-9]*)(?P<frac>\.[0-9]*)?|(?P<bare>\.[0-9]+))(?P<exp>[eE][+-]?[0-9]+)?")
PLAIN = {"'": re.compile(r"[^'\\]+"), '"': re.compile(r'[^"\\]+')}
NEUTRAL = re.compile(r"[^'\"()\[\]{}]+")
SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
SIMPLE |= {char: char for char in "\\'\"/"}  # JSON escapes slashes, Python does not
CODES = {"x": 2, "u": 4, "U": 8}
HEX = re.compile(r"[0-9A-Fa-f]")


# Lark rules of what `PythonValue` reads, except names and expressions.
VALUE_RULES = r"""
python_value: PYTHON_STRING | PYTHON_NUMBER | PYTHON_WORD | python_list | python_dict
python_list: "[" PYTHON_SPACE (python_value python_item*)? PYTHON_SPACE "]"
python_item: PYTHON_SPACE "," PYTHON_SPACE python_value
python_dict: "{" PYTHON_SPACE (python_pair python_next_pair*)? PYTHON_SPACE "}"
python_pair: PYTHON_STRING PYTHON_SPACE ":" PYTHON_SPACE python_value
python_next_pair: PYTHON_SPACE "," PYTHON_SPACE python_pair
PYTHON_STRING: /'([^'\\\x00-\x1f]|PYTHON_ESCAPE)*'/ | /"([^"\\\x00-\x1f]|PYTHON_ESCAPE)*"/
PYTHON_NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
PYTHON_WORD: "True" | "False" | "None" | "true" | "false" | "null"
PYTHON_SPACE: /[ \n]{0,4}/
""".replace("PYTHON_ESCAPE", r"""\\['"\\\/nrtbf]|\\u[0-9a-fA-F]{4}""")


class PythonValue:
    """Reader of one literal; `json` is its JSON so far.

    Digits stay unchanged, and tuples become lists. A name, perhaps with an index or a call after it, becomes a string
    of its source, since models write variables.
    """

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self._json: list[str] = []

    @property
    def json(self) -> str:
        return "".join(self._json)

    def read(self, depth: int = 0) -> Steps[None]:
        """Read the literal. Raise `MalformedCall` or `CallCutOff`."""
        char = yield from next_char(self._reader)
        if char in "'\"":
            yield from self._string(char)
        elif char in "[(":
            yield from self._list(char, depth)
        elif char == "{":
            yield from self._dict(depth)
        elif char in "+-.0123456789":
            yield from self._number()
        else:
            yield from self._word()

    # --- values without parts --------------------------------------------------------------------------------------
    def _string(self, quote: str) -> Steps[None]:
        reader = self._reader
        reader.take(1)
        self._json.append('"')
        while (char := (yield from next_char(self._reader))) != quote:
            if char == "\\":
                reader.take(1)
                yield from self._escape()
            else:
                yield from reader.run(PLAIN[quote], self._add_text)
        reader.take(1)
        self._json.append('"')

    def _escape(self) -> Steps[None]:
        yield from next_char(self._reader)
        char = self._reader.take(1)
        if char in CODES:
            code = yield from self._code(CODES[char])
            # Halves of a surrogate pair stay escaped, since they are not text on their own.
            self._json.append(f"\\u{code:04x}") if 0xD800 <= code < 0xE000 else self._add_text(chr(code))
        else:
            self._add_text(SIMPLE.get(char, f"\\{char}"))

    def _code(self, length: int) -> Steps[int]:
        digits = ""
        while len(digits) < length:
            if not HEX.fullmatch((yield from next_char(self._reader))):
                raise MalformedCall
            digits += self._reader.take(1)
        code = int(digits, 16)
        if code > 0x10FFFF:
            raise MalformedCall
        return code

    def _number(self) -> Steps[None]:
        text = (yield from self._reader.run(NUMBER_CHARS)).replace("_", "")
        number = NUMBER.fullmatch(text)
        if number is None:
            raise MalformedCall
        sign = "-" if text.startswith("-") else ""
        frac = number["frac"] or number["bare"] or ""
        frac += "0" if frac == "." else ""
        self._json.append(sign + (number["whole"] or "0") + frac + (number["exp"] or ""))

    def _word(self) -> Steps[None]:
        word = yield from self._reader.run(WORD)
        if not IDENTIFIERS.fullmatch(word):
            raise MalformedCall
        if (yield from next_char(self._reader)) not in "([":
            self._json.append(WORDS.get(word) or quoted(word))
            return
        source = [word]
        while (yield from next_char(self._reader)) in "([":
            yield from self._brackets(source.append)
        self._json.append(quoted("".join(source)))

    def _brackets(self, sink: Callable[[str], object]) -> Steps[None]:
        """Take text up to the bracket that closes the next one, without interpreting it."""
        depth = 0
        while True:
            char = yield from next_char(self._reader)
            if char in PLAIN:
                yield from self._source_of_string(char, sink)
                continue
            depth += (char in "([{") - (char in ")]}")
            sink(self._reader.take(1))
            if depth == 0:
                return
            yield from self._reader.run(NEUTRAL, sink)

    def _source_of_string(self, quote: str, sink: Callable[[str], object]) -> Steps[None]:
        sink(self._reader.take(1))
        while (char := (yield from next_char(self._reader))) != quote:
            if char == "\\":
                sink(self._reader.take(1))
                yield from next_char(self._reader)
                sink(self._reader.take(1))
            else:
                yield from self._reader.run(PLAIN[quote], sink)
        sink(self._reader.take(1))

    # --- values with parts -----------------------------------------------------------------------------------------
    def _list(self, bracket: str, depth: int) -> Steps[None]:
        """Read a list, a tuple, or a value in parentheses."""
        closer = "]" if bracket == "[" else ")"
        place = self._open("[", depth)
        items = commas = 0
        while (yield from self._next()) != closer:
            if items:
                self._json.append(", ")
            yield from self.read(depth + 1)
            items += 1
            commas += yield from self._comma(closer)
        self._reader.take(1)
        if bracket == "(" and items == 1 and not commas:
            self._json[place] = ""
        else:
            self._json.append("]")

    def _dict(self, depth: int) -> Steps[None]:
        self._open("{", depth)
        items = 0
        while (yield from self._next()) != "}":
            if items:
                self._json.append(", ")
            yield from self._key(depth)
            if (yield from self._next()) != ":":
                raise MalformedCall
            self._reader.take(1)
            self._json.append(": ")
            yield from self._next()
            yield from self.read(depth + 1)
            items += 1
            yield from self._comma("}")
        self._reader.take(1)
        self._json.append("}")

    def _key(self, depth: int) -> Steps[None]:
        """Read a key. JSON's keys are strings: other values become strings, except lists and similar ones."""
        if (yield from next_char(self._reader)) in "[({":
            raise MalformedCall
        place = len(self._json)
        yield from self.read(depth + 1)
        if self._json[place] != '"':
            self._json[place:] = [quoted("".join(self._json[place:]))]

    # --- steps -------------------------------------------------------------------------------------------------------
    def _open(self, bracket: str, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise MalformedCall
        self._reader.take(1)
        self._json.append(bracket)
        return len(self._json) - 1

    def _next(self) -> Steps[str]:
        """Return the next character that is no white space."""
        yield from self._reader.space()
        return (yield from next_char(self._reader))

    def _comma(self, closer: str) -> Steps[bool]:
        """Take a comma after an item, but not the closing bracket. Return True for a comma."""
        char = yield from self._next()
        if char != closer and char != ",":
            raise MalformedCall
        if char == ",":
            self._reader.take(1)
        return char == ","

    def _add_text(self, text: str) -> None:
        self._json.append(quoted(text)[1:-1])


def quoted(text: str) -> str:
    """Return the text as a JSON string."""
    return encode_basestring(text)
