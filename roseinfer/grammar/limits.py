"""What a constraint may cost: the sizes that are looked at before anything is compiled."""

from typing import Any

from roseinfer.grammar.library import GrammarError

# Of a schema, a grammar or a structural tag, and of all schemas of a request's tools together.
MAX_BYTES = 256 * 1024
MAX_DEPTH = 100
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICES = 1024


def too_complex(message: str) -> GrammarError:
    return GrammarError(message, code="grammar_too_complex")


def check_depth(value: Any) -> None:
    """Raises `GrammarError` for more than `MAX_DEPTH` objects and lists within one another. A loop: the depth is a
    stranger's.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [entry for entry in level if isinstance(entry, dict | list)]
        if not level:
            return
        level = [entry for outer in level for entry in (outer.values() if isinstance(outer, dict) else outer)]
    raise too_complex(f"nested deeper than {MAX_DEPTH} levels")


def check_regex(pattern: str) -> None:
    if len(pattern.encode()) > MAX_REGEX_BYTES:
        raise too_complex(f"a regular expression is longer than {MAX_REGEX_BYTES} bytes")
