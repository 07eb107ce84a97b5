"""Query parameters of routes."""

from collections.abc import Iterable
from typing import Any

from roseinfer.server.http.errors import bad_request

MODEL_PARAMETER: dict[str, Any] = {
    "name": "model",
    "in": "query",
    "description": "name of the model; required if the server has several",
    "required": False,
    "schema": {"type": "string"},
}


def chosen_model(asked: Iterable[tuple[str, str]]) -> str | None:
    """Return the model that a query names. Raises `ApiError` 400 if it names several."""
    names = [value for name, value in asked if name == "model"]
    if len(names) > 1:
        raise bad_request("model is given twice", "model")
    return names[0] if names else None


def limit_of(text: str | None, default: int, most: int) -> int:
    """Return the length of a page. Raises `ApiError` 400 that names `limit`."""
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise bad_request(f"limit must be within [1, {most}], got {text[:20]!r}", "limit")
    return int(text)
