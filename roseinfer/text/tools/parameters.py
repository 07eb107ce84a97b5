"""Parameters of a tool, for formats that write them separately."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from roseinfer.core.errors import InvalidRequestError
from roseinfer.text.tools.base import Tool

# Places of definitions that `$ref` may name.
DEFINITIONS = ("$defs", "definitions")
# Keywords of an object's schema that these formats enforce, or that do not restrict values.
KEPT = frozenset({"type", "properties", "required", "additionalProperties", *DEFINITIONS})
KEPT |= {"title", "description", "$schema", "$id", "$comment", "default", "examples"}
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter with a complete `schema`: it includes the definitions that it refers to."""

    name: str
    schema: Mapping[str, Any]
    required: bool

    @property
    def types(self) -> frozenset[str]:
        """JSON types of its values, as far as the schema shows them, including null as a default."""
        found = frozenset(_types(self.schema))
        return found | {"null"} if found and self.schema.get("default", "") is None else found


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a tool: `all` in the order of the schema; `open`: others may be given as well."""

    all: tuple[Parameter, ...]
    open: bool

    @classmethod
    def of(cls, tool: Tool) -> "Parameters":
        """Return the parameters. Restrictions of the schema beyond single parameters are left out.

        A strict tool must not have any, see `check`.
        """
        schema = tool.schema
        shared = {key: schema[key] for key in DEFINITIONS if key in schema}
        properties = schema.get("properties")
        required = schema.get("required")
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        found = [
            Parameter(name, _whole(part, shared), name in names)
            for name, part in (properties.items() if isinstance(properties, dict) else ())
            if part is not False
        ]
        return cls(tuple(found), schema.get("additionalProperties", True) is not False)

    @staticmethod
    def check(tool: Tool, format: str) -> None:
        """Raise `InvalidRequestError` for a strict tool whose schema this format cannot enforce."""
        if not tool.strict:
            return
        keyword = next((key for key in tool.schema if key not in KEPT), None)
        if keyword is None and isinstance(tool.schema.get("additionalProperties"), dict):
            keyword = "additionalProperties"
        if keyword is None and any(not ref.startswith(_PLACES) for ref in _refs(tool.schema)):
            keyword = "$ref"
        if keyword is not None:
            raise refusal(tool, keyword, format)


_PLACES = tuple(f"#/{key}/" for key in DEFINITIONS)


def refusal(tool: Tool, keyword: str, format: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tool {tool.name!r} is strict: {keyword!r} cannot be enforced in the format of this model's calls, {format}",
        "tools",
        "unsupported_schema",
    )


def _whole(schema: Any, shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `schema` with the definitions that it refers to; any schema if it refers to others."""
    if not isinstance(schema, dict) or any(not ref.startswith(_PLACES) for ref in _refs(schema)):
        return {}
    return {**schema, **shared}


def _refs(schema: Any) -> Iterator[str]:
    """Yield all values of `$ref`."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            left += part.values()
        elif isinstance(part, list):
            left += part


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield JSON types that `schema` allows, perhaps repeatedly. The schema may be invalid."""
    left: list[Any] = [schema]
    followed: set[str] = set()
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        kinds = part.get("type")
        if kinds is not None:
            yield from (kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str))
            continue
        yield from _types_of_values(part)
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in followed:
            followed.add(ref)
            left.append(_resolved(ref, schema))
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(part.get(key), list):
                left += part[key]


def _types_of_values(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types that a schema implies without `type`."""
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    yield from (TYPES.get(type(value), "null") for value in values)
    if "properties" in schema:
        yield "object"
    if "items" in schema:
        yield "array"


def _resolved(ref: str, root: Mapping[str, Any]) -> Any:
    part: Any = root
    for name in ref.removeprefix("#/").split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, dict) else None
    return part
