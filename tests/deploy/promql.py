"""Parser for PromQL that finds the metrics and labels of a query."""

import re
from collections.abc import Iterator
from typing import NamedTuple

# Keywords of prometheus.io/docs/prometheus/latest/querying that look like names of metrics.
_WORDS = frozenset(["and", "or", "unless", "offset", "bool", "inf", "nan", "atan2"])
_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<number>\d[\d.]*(?:e[+-]?\d+)?[a-z]*)"""
    r"""|(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)|(?P<sign>=~|!~|!=|[=<>]=?|[(){},+*/^%-])|(?P<space>\s+)|(?P<other>.)"""
)
_GROUPING = frozenset(["by", "without", "on", "ignoring", "group_left", "group_right"])


class Selector(NamedTuple):
    """Metric with the labels in its braces."""

    metric: str
    labels: frozenset[str]


class Query(NamedTuple):
    """Metrics and labels of a query. `grouped`: labels in `by (...)` and similar clauses."""

    selectors: tuple[Selector, ...]
    grouped: frozenset[str]


def parse(text: str) -> Query:
    """Parse a query. Raise `ValueError` if it contains other than tokens of PromQL."""
    tokens = list(_tokens(text))
    selectors: list[Selector] = []
    grouped: set[str] = set()
    at = 0
    while at < len(tokens):
        kind, value = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        at += 1
        if kind != "name":
            continue
        if value.lower() in _GROUPING:
            if following == "(":
                end = tokens.index(("sign", ")"), at)
                grouped |= {name for kind, name in tokens[at:end] if kind == "name"}
                at = end
        elif value.lower() not in _WORDS and following != "(" and not _is_function(tokens, at):
            labels, at = _braces(tokens, at)
            selectors.append(Selector(value, labels))
    return Query(tuple(selectors), frozenset(grouped))


def _is_function(tokens: list[tuple[str, str]], at: int) -> bool:
    """Return True if this is an aggregation such as `sum by (x) (...)`."""
    return at < len(tokens) and tokens[at][1].lower() in ("by", "without")


def _braces(tokens: list[tuple[str, str]], at: int) -> tuple[frozenset[str], int]:
    if at >= len(tokens) or tokens[at][1] != "{":
        return frozenset(), at
    end = tokens.index(("sign", "}"), at)
    return frozenset(name for kind, name in tokens[at:end] if kind == "name"), end + 1


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    for found in _TOKEN.finditer(text):
        kind = str(found.lastgroup)
        if kind == "other":
            raise ValueError(f"{found.group()!r} in {text}")
        if kind not in ("space", "range"):
            yield kind, found.group()
