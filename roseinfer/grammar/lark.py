"""Parts of grammars in Lark as llguidance reads it, and llguidance's serialised form."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from orjson import dumps, loads

from roseinfer.grammar.library import GrammarError, gbnf_to_lark, slashes_escaped
from roseinfer.grammar.limits import MAX_CHOICES, MAX_LITERAL_BYTES, check_literal, check_regex, too_complex

# Models write line breaks between the end of their thinking and a document.
LEADING_SPACE = r"/[ \n]{0,8}/"
# Options of a rule. Some cannot be supported: `temperature` changes sampling, `stop` takes tokens back.
_RULE_OPTIONS = re.compile(r"(?m)^[ \t]*[?!]*[\w-]+[ \t]*\[([^\]\n]*)\]")
# Lark's strings and regexes end on their line.
_LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"|/((?:[^/\\\n]|\\.)+)/')
_UNSUPPORTED_OPTION = re.compile(r"\b(temperature|stop|stop_capture)\b[ \t]*(?:=|,|$)")


def literal(text: str, markers: Mapping[str, int]) -> str:
    """Return `text` as an expression.

    `markers`: special tokens (text -> id). Where the text contains one, the model may sample the token or spell it.
    """
    names = sorted(filter(None, markers), key=len, reverse=True)
    if not names:
        return quoted(text)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
    terms = [f"({quoted(part)} | <[{markers[part]}]>)" if part in markers else quoted(part) for part in parts if part]
    return " ".join(terms) or '""'


def quoted(text: str) -> str:
    """Return `text` as a string. Raises `GrammarError` for a text that is too long."""
    check_literal(text, "the constraint")
    # Lark's strings are those of JSON.
    return dumps(text).decode().replace("\x7f", "\\u007f")


def regex_grammar(pattern: str) -> str:
    check_regex(pattern)
    return serialised([{"lark_grammar": f"start: TEXT\nTEXT: {regex_term(pattern)}"}])


def regex_term(pattern: str) -> str:
    """Return a regex as an expression."""
    return f"/{slashes_escaped(pattern)}/" if pattern else '""'


def choice_grammar(choices: list[str]) -> str:
    if not choices:
        raise GrammarError("the list of choices is empty")
    if len(choices) > MAX_CHOICES:
        raise too_complex(f"{len(choices)} choices, at most {MAX_CHOICES} are allowed")
    for choice in choices:
        check_literal(choice, "choice")
    return serialised([{"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, choices))}])


def lark_text(text: str) -> str:
    """Return a client's grammar in Lark. Raises `GrammarError` for invalid GBNF and unsupported options of rules."""
    if "::=" in text:
        text = gbnf_to_lark(text)
        _check_literals(text)
        return text
    _check_literals(text)
    for options in _RULE_OPTIONS.findall(text):
        found = _UNSUPPORTED_OPTION.search(options)
        if found is not None:
            raise GrammarError(f"the option {found[1]!r} of a rule is not supported")
    return text


def _check_literals(text: str) -> None:
    """Raise `GrammarError` for a string or regex of a grammar that is too long."""
    if len(text) <= MAX_LITERAL_BYTES // 4:  # of at most 4 bytes each
        return
    for string, regex in _LITERALS.findall(text):
        check_literal(string or regex, "the grammar")


def serialised(grammars: Iterable[Mapping[str, Any]]) -> str:
    """Return grammars in llguidance's form. The first is the whole; it may refer to the others as `@name`."""
    return dumps({"grammars": list(grammars)}).decode()


def with_leading_space(grammar: str) -> str:
    """Return a grammar that also accepts white space before its texts. `grammar` is serialised."""
    first, *others = loads(grammar)["grammars"]
    start = {"lark_grammar": f"start: SPACE @answer\nSPACE: {LEADING_SPACE}"}
    return serialised([start, first | {"name": "answer"}, *others])
