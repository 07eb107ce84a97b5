"""Structural tags: free text with constrained parts between tags.

There are two forms: `structures` with `triggers`, and `format`, a tree of nodes. For tags within otherwise free text,
each trigger has a grammar of its own, so free text needs no masks. Every other tag becomes one grammar in Lark.
llguidance's `StructTag` covers triggered tags only, and would compute masks for the free text, too.
"""

from collections.abc import Callable, Mapping
from typing import Any

from roseinfer.core.guide import Trigger
from roseinfer.grammar.constraint import BuiltGrammar, StructuralTag
from roseinfer.grammar.json_schema import schema_text
from roseinfer.grammar.lark import lark_text, literal, quoted, regex_term, serialised
from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import MAX_CHOICES, check_regex, too_complex

Node = dict[str, Any]
# `(?s:.*)`: including line breaks.
FREE_TEXT = "FREE: /(?s:.*)/"


def structural_tag_grammar(tag: StructuralTag, markers: Mapping[str, int]) -> BuiltGrammar:
    """Return the grammar of a structural tag. Raises `GrammarError` that names the node."""
    node = _normalised(tag.spec)
    if node.get("type") == "triggered_tags" and not _flag(node, "at_least_one"):
        return _triggered(node, tag, markers)
    rules = _Rules(tag, markers)
    rules.define("start", rules.expression(node, ""))
    return BuiltGrammar(grammar=rules.text(), warnings=tuple(rules.ignored))


def _normalised(spec: Node) -> Node:
    """Return the tree of a tag in either form."""
    known = {"type", "format", "structures", "triggers"}
    extra = sorted(str(name)[:80] for name in spec.keys() - known)
    if extra:
        raise GrammarError(f"structural_tag: unknown field {extra[0]!r}")
    if "format" in spec:
        if "structures" in spec or "triggers" in spec:
            raise GrammarError("structural_tag: give either format, or structures and triggers")
        return _node(spec["format"], "format")
    structures = _nodes({"type": "structural_tag"} | spec, "structures")
    tags = [
        {
            "type": "tag",
            "begin": _text(entry, "begin"),
            "content": {"type": "json_schema", "json_schema": _required(entry, "schema")},
            "end": _text(entry, "end"),
        }
        for entry in structures
    ]
    return {"type": "triggered_tags", "triggers": spec.get("triggers"), "tags": tags}


def _triggered(node: Node, tag: StructuralTag, markers: Mapping[str, int]) -> BuiltGrammar:
    triggers = []
    ignored: dict[str, None] = {}
    for trigger, tags in _by_trigger(node).items():
        rules = _Rules(tag, markers)
        rules.define("start", rules.tags(tags, after=trigger))
        ignored |= rules.ignored
        triggers.append(Trigger(grammar=rules.text(), text=trigger, token_id=markers.get(trigger)))
    ends_after = 1 if _flag(node, "stop_after_first") else 0
    return BuiltGrammar(triggers=tuple(triggers), ends_after=ends_after, warnings=tuple(ignored))


class _Rules:
    """Builder of a grammar in Lark."""

    def __init__(self, tag: StructuralTag, markers: Mapping[str, int]) -> None:
        self.ignored: dict[str, None] = {}
        self._options = tag.options
        self._markers = markers
        self._rules: list[str] = [FREE_TEXT]
        self._others: list[dict[str, str]] = []

    def text(self) -> str:
        return serialised([{"lark_grammar": "\n".join(self._rules)}, *self._others])

    def define(self, name: str, expression: str, options: str = "") -> str:
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def expression(self, node: Node, end: str) -> str:
        """Return the expression of a node, followed by the text `end`."""
        kind = node.get("type")
        make = _KINDS.get(kind) if isinstance(kind, str) else None
        if make is None:
            raise GrammarError(f"structural_tag: nodes of type {str(kind)[:80]!r} are not supported")
        return make(self, node, end)

    def _followed(self, expression: str, end: str) -> str:
        return f"({expression}) {literal(end, self._markers)}" if end else expression

    def const_string(self, node: Node, end: str) -> str:
        return literal(_text(node, "value") + end, self._markers)

    def json_schema(self, node: Node, end: str) -> str:
        schema = _required(node, "json_schema")
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise GrammarError("structural_tag: json_schema must be an object")
        made = schema_text(schema, strict=_flag(node, "strict"), options=self._options)
        self.ignored |= dict.fromkeys(made.ignored)
        return self._followed(self.define(self._name(), f"%json {made.text}"), end)

    def regex(self, node: Node, end: str) -> str:
        pattern = _text(node, "pattern")
        check_regex(pattern)
        return self._followed(regex_term(pattern), end)

    def grammar(self, node: Node, end: str) -> str:
        name = f"grammar{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": lark_text(_text(node, "grammar"))})
        return self._followed(f"@{name}", end)

    def any_text(self, node: Node, end: str) -> str:
        if node.get("excludes"):
            raise GrammarError("structural_tag: any_text with excludes is not supported")
        return self._until(end) if end else "FREE"

    def sequence(self, node: Node, end: str) -> str:
        """Return the elements one after another. A text must follow free text, which ends at its first occurrence."""
        parts: list[str] = []
        elements = _nodes(node, "elements")
        at = 0
        while at < len(elements):
            element, last = elements[at], at == len(elements) - 1
            if last or not _ends_free(element):
                parts.append(self.expression(element, end if last else ""))
            else:
                following = elements[at + 1]
                if following.get("type") != "const_string" or not following.get("value"):
                    raise GrammarError("structural_tag: free text within a sequence must be followed by a const_string")
                at += 1
                own_end = _text(following, "value")
                parts.append(self.expression(element, own_end))
                if at == len(elements) - 1 and end:
                    parts.append(literal(end, self._markers))
            at += 1
        return " ".join(f"({part})" for part in parts)

    def either(self, node: Node, end: str) -> str:
        return " | ".join(f"({self.expression(element, end)})" for element in _nodes(node, "elements"))

    def tag(self, node: Node, end: str) -> str:
        return self.tags([node], after="", end=end)

    def tags(self, tags: list[Node], after: str, end: str = "") -> str:
        """Return the alternatives of tags whose beginning `after` has been written."""
        parts = []
        for tag in tags:
            begin = _text(tag, "begin")[len(after) :]
            content = self.expression(_node(_required(tag, "content"), "content"), _text(tag, "end") + end)
            parts.append(f"{literal(begin, self._markers)} ({content})" if begin else f"({content})")
        return " | ".join(parts)

    def triggered_tags(self, node: Node, end: str) -> str:
        """Return text and tags in turn. Text comes first unless a tag is required."""
        by_trigger = _by_trigger(node)
        opened = []
        for trigger, tags in by_trigger.items():
            head = self._until(trigger)
            opened.append(self.define(self._name(), f"{head} ({self.tags(tags, after=trigger)})"))
        more = " | ".join(opened)
        if _flag(node, "at_least_one"):
            first = self.define(self._name(), self.tags([tag for tags in by_trigger.values() for tag in tags], ""))
            if _flag(node, "stop_after_first"):
                return self._followed(first, end)
            return f"{first} ({more})* {self._until(end) if end else 'FREE'}"
        rest = self._until(end) if end else "FREE"
        if _flag(node, "stop_after_first"):
            return f"{self._followed(more, end)} | {rest}"
        return f"({more})* {rest}"

    def _until(self, text: str) -> str:
        """Return free text up to the first `text`, included."""
        return self.define(self._name(), f"FREE {quoted(text)}", "[lazy]")

    def _name(self) -> str:
        return f"r{len(self._rules)}"


_KINDS: dict[str, Callable[[_Rules, Node, str], str]] = {
    "const_string": _Rules.const_string,
    "json_schema": _Rules.json_schema,
    "regex": _Rules.regex,
    "grammar": _Rules.grammar,
    "any_text": _Rules.any_text,
    "sequence": _Rules.sequence,
    "or": _Rules.either,
    "tag": _Rules.tag,
    "triggered_tags": _Rules.triggered_tags,
}


def _ends_free(node: Node) -> bool:
    """Return True if a node ends in free text, which needs a text that ends it."""
    kind = node.get("type")
    if kind in ("sequence", "or"):
        elements = _nodes(node, "elements")
        return any(map(_ends_free, elements[-1:] if kind == "sequence" else elements))
    return kind == "any_text" or (kind == "triggered_tags" and not _flag(node, "stop_after_first"))


def _by_trigger(node: Node) -> dict[str, list[Node]]:
    """Return the tags of each trigger."""
    triggers = node.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise GrammarError("structural_tag: triggers must be a list of texts")
    if node.get("excludes"):
        raise GrammarError("structural_tag: triggered_tags with excludes are not supported")
    found: dict[str, list[Node]] = {trigger: [] for trigger in triggers}
    for tag in _nodes(node, "tags"):
        begin = _text(tag, "begin")
        mine = [trigger for trigger in found if begin.startswith(trigger)]
        if len(mine) != 1:
            many = "more than one trigger" if mine else "no trigger"
            raise GrammarError(f"structural_tag: {many} begins the tag {begin[:80]!r}")
        found[mine[0]].append(tag)
    for trigger, tags in found.items():
        if not tags:
            raise GrammarError(f"structural_tag: no tag begins with the trigger {trigger[:80]!r}")
    return found


def _required(node: Node, name: str) -> Any:
    if node.get(name) is None:
        where = str(node.get("type", "a structure"))[:80]
        raise GrammarError(f"structural_tag: {where} needs {name!r}")
    return node[name]


def _text(node: Node, name: str) -> str:
    value = _required(node, name)
    if not isinstance(value, str):
        raise GrammarError(f"structural_tag: {name!r} must be a text")
    return value


def _flag(node: Node, name: str) -> bool:
    value = node.get(name)
    if value is not None and not isinstance(value, bool):
        raise GrammarError(f"structural_tag: {name!r} must be true or false")
    return bool(value)


def _node(value: Any, name: str) -> Node:
    if not isinstance(value, dict):
        raise GrammarError(f"structural_tag: {name!r} must be an object")
    return value


def _nodes(node: Node, name: str) -> list[Node]:
    value = _required(node, name)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"structural_tag: {name!r} must be a list that is not empty")
    if len(value) > MAX_CHOICES:
        raise too_complex(f"structural_tag: {name!r} has {len(value)} entries, at most {MAX_CHOICES} are allowed")
    return [_node(entry, name) for entry in value]
