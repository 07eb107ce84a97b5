"""Limits on the size and cost of constraints. Sizes are checked before anything is compiled."""

from typing import Any

from roseinfer.grammar.library import GrammarError

# Limit for a schema, a grammar or a structural tag, and for all schemas of a request's tools together.
MAX_BYTES = 256 * 1024
MAX_DEPTH = 100
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICES = 1024
# Limit for a literal: a value of enum or const, a name in a schema, a choice, a string of a grammar. Within one, a mask
# takes 0.11 us for each byte that is left (llguidance 1.9.1), 0.9 ms for this many.
MAX_LITERAL_BYTES = 8 * 1024
# Time for the masks of all samples of a request in each step. `FREE_MASK_S` of each sample does not count.
MAX_MASKS_S = 0.02
FREE_MASK_S = 50e-6


def too_complex(message: str) -> GrammarError:
    return GrammarError(message, code="grammar_too_complex")


def check_depth(value: Any) -> None:
    """Raise `GrammarError` for more than `MAX_DEPTH` nested objects and lists."""
    level = [value]  # a loop: a client's nesting must not exhaust the stack
    for _ in range(MAX_DEPTH + 1):
        level = [entry for entry in level if isinstance(entry, dict | list)]
        if not level:
            return
        level = [entry for outer in level for entry in (outer.values() if isinstance(outer, dict) else outer)]
    raise too_complex(f"nested deeper than {MAX_DEPTH} levels")


def check_regex(pattern: str) -> None:
    if len(pattern.encode()) > MAX_REGEX_BYTES:
        raise too_complex(f"a regular expression is longer than {MAX_REGEX_BYTES} bytes")


def check_literal(text: str, where: str) -> None:
    """Raise `GrammarError` for a literal of more than `MAX_LITERAL_BYTES`. `where`: its name in the message."""
    size = len(text.encode(errors="replace"))
    if size > MAX_LITERAL_BYTES:
        raise too_complex(f"a text in {where} has {size} bytes, at most {MAX_LITERAL_BYTES} are allowed")


def check_literals(value: Any, where: str) -> None:
    """Check all texts within a value, whose depth has been checked. Raises `GrammarError`."""
    if isinstance(value, str):
        check_literal(value, where)
    elif isinstance(value, dict | list):
        for entry in (*value, *value.values()) if isinstance(value, dict) else value:
            check_literals(entry, where)


def check_mask_time(mask_s: float, n: int) -> None:
    """Raise `GrammarError` if the masks of `n` samples, of `mask_s` seconds each, take too long together."""
    if n * (mask_s - FREE_MASK_S) > MAX_MASKS_S:
        samples = f"{n} samples take {1000 * n * mask_s:.0f} ms" if n > 1 else f"it takes {1000 * mask_s:.0f} ms"
        advice = "use a smaller n, or a smaller or simpler constraint" if n > 1 else "use a smaller or simpler one"
        allowed = f"at most {1000 * MAX_MASKS_S:.0f} ms are allowed"
        raise too_complex(f"the constraint is too slow: {samples} for each token, {allowed}; {advice}")
