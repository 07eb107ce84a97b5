"""Graph of a JSON schema: the parts that an instance can reach, and the references between them."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
# A part of a schema by its identity, or the part as an object or as an array.
Node = int | tuple[str, int]

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = (
    "additionalProperties",
    "items",
    "additionalItems",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")


class SchemaGraph:
    """Parts of `schema` that can be reached from its root, each once, the root first."""

    def __init__(self, schema: Schema) -> None:
        self.root = schema
        self.parts: list[Schema] = []
        self._with_definitions = False
        seen: set[int] = set()
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            self.parts.append(part)
            waiting += self._below(part)

    def loops(self) -> bool:
        """Return True if a part refers to itself without reading anything of an instance: it has no meaning."""
        done: set[int] = set()
        for start in self.parts:
            path: set[int] = set()
            # (part, leaving): depth first; a part is left after all parts that it refers to.
            waiting = [(start, False)]
            while waiting:
                part, leaving = waiting.pop()
                if leaving:
                    path.discard(id(part))
                    done.add(id(part))
                elif id(part) in path:
                    return True
                elif id(part) not in done:
                    path.add(id(part))
                    waiting.append((part, True))
                    waiting += [(other, False) for other in self._in_place(part)]
        return False

    def has_finite_instance(self) -> bool:
        """Return True unless the schema's recursion rules out every finite document.

        A part has a finite instance if all its conditions hold, and a condition holds if one of its parts has one. Each
        condition is met once (Dowling and Gallier 1984), so the work is linear in the schema.
        """
        unmet: dict[Node, int] = {}
        watchers: dict[Node, list[list[Node]]] = {}  # part -> [[owner of a condition it meets], ...], emptied when met
        finite: list[Node] = []
        for part in self.parts:
            for node, conditions in self._conditions(part).items():
                unmet[node] = len(conditions)
                if not conditions:
                    finite.append(node)
                for alternatives in conditions:
                    condition = [node]
                    for other in alternatives:
                        watchers.setdefault(other, []).append(condition)
        while finite:
            for condition in watchers.pop(finite.pop(), ()):
                if condition:
                    owner = condition.pop()
                    unmet[owner] -= 1
                    if not unmet[owner]:
                        finite.append(owner)
        return not unmet[id(self.root)]

    def _conditions(self, part: Schema) -> dict["Node", list[list["Node"]]]:
        """Return the conditions of a part, and of its object and array forms if it allows no other type."""
        target = self._target(part)
        own: list[list[Node]] = [] if target is None else [[id(target)]]
        own += [[id(other)] for other in _schemas(_list(part.get("allOf")))]
        for name in ("anyOf", "oneOf"):
            options = _list(part.get(name))
            if options and all(isinstance(option, dict) for option in options):
                own.append([id(option) for option in options])
        found: dict[Node, list[list[Node]]] = {id(part): own}
        kinds = part.get("type")
        kinds = {kinds} if isinstance(kinds, str) else set(map(str, _list(kinds)))
        if kinds and kinds <= _NEEDS.keys() and "enum" not in part and "const" not in part:
            for kind in kinds:
                found[kind, id(part)] = [[id(other)] for other in _schemas(_NEEDS[kind](part))]
            own.append([(kind, id(part)) for kind in kinds])
        return found

    def _below(self, part: Schema) -> Iterator[Schema]:
        for name in _ONE:
            if isinstance(part.get(name), dict):
                yield part[name]
        for name in _SEVERAL:
            yield from _schemas(_list(part.get(name)))
        for name in _NAMED:
            if isinstance(part.get(name), dict):
                yield from _schemas(part[name].values())
        target = self._target(part)
        if target is not None:
            yield target
        elif isinstance(part.get("$ref"), str) and not self._with_definitions:
            self._with_definitions = True
            yield from self._definitions()  # a reference by anchor or id may name any of them

    def _in_place(self, part: Schema) -> Iterator[Schema]:
        """Yield the parts that an instance of `part` must follow as well, or may."""
        target = self._target(part)
        if target is not None:
            yield target
        for name in ("allOf", "anyOf", "oneOf"):
            yield from _schemas(_list(part.get(name)))

    def _definitions(self) -> Iterator[Schema]:
        for name in _DEFINITIONS:
            if isinstance(self.root.get(name), dict):
                yield from _schemas(self.root[name].values())

    def _target(self, part: Schema) -> Schema | None:
        return resolve_reference(self.root, part.get("$ref"))


def resolve_reference(root: Schema, reference: Any) -> Schema | None:
    """Return the schema that a `$ref` by JSON pointer (RFC 6901) names, None if there is none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    place: Any = root
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return None
    return place if isinstance(place, dict) else None


def _needed_properties(part: Schema) -> list[Any]:
    named = part.get("properties")
    named = named if isinstance(named, dict) else {}
    return [named[name] for name in _list(part.get("required")) if isinstance(name, str) and name in named]


def _needed_items(part: Schema) -> list[Any]:
    least = part.get("minItems")
    if not isinstance(least, int | float) or least < 1:
        return []
    first = _list(part.get("prefixItems")) or _list(part.get("items"))
    rest = [part["items"]] if least > len(first) and isinstance(part.get("items"), dict) else []
    return first[: int(least)] + rest


_NEEDS = {"object": _needed_properties, "array": _needed_items}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _schemas(values: Any) -> Iterator[Schema]:
    return (value for value in values if isinstance(value, dict))
