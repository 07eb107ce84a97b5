"""JSON schemas for loads that measure the cost of constraints: an output cannot be complete before its last token."""

from typing import Any

# Required names that no vocabulary has as one token together with the quotes, so that an item takes several tokens.
_PARTS: tuple[dict[str, Any], ...] = (
    {
        "description": {"type": "string", "maxLength": 40},
        "quantity": {"type": "integer"},
        "available": {"type": "boolean"},
    },
    {
        "coordinates": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
        "classification": {"enum": ["animal", "vegetable", "mineral"]},
    },
    {
        "identifier": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
        "recorded_at": {"type": "string", "format": "date"},
        "annotations": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    {
        "customer": {
            "type": "object",
            "properties": {"surname": {"type": "string", "maxLength": 20}, "reference": {"type": "integer"}},
            "required": ["surname", "reference"],
            "additionalProperties": False,
        },
        "comment": {"anyOf": [{"type": "string", "maxLength": 60}, {"type": "null"}]},
    },
)


def record_schema(tokens: int) -> dict[str, Any]:
    """Return a schema of a list of plain records; every document has more than `tokens` tokens."""
    return {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "integer"},
                "name": {"type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "active": {"type": "boolean"},
            },
            "required": ["id", "name", "tags", "active"],
            "additionalProperties": False,
        },
        "minItems": tokens,
    }


def endless_schema(number: int, tokens: int) -> dict[str, Any]:
    """Return a schema of the kind `number` (in turn); every document has more than `tokens` tokens."""
    properties = _PARTS[number % len(_PARTS)]
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": tokens}


def constrained(number: int, share: float) -> bool:
    """True if request `number` is in the share that has a schema, which is spread evenly from the first request on."""
    return int((number + 1) * share) > int(number * share)
