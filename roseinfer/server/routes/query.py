"""Query parameters of routes."""

from collections.abc import Iterable
from typing import Any

from roseinfer.server.http.errors import bad_request


def parameter(name: str, description: str, *, required: bool = False, **schema: Any) -> dict[str, Any]:
    """Return a parameter for the OpenAPI document. `schema`: of its value."""
    return {"name": name, "in": "query", "description": description, "required": required, "schema": schema}


MODEL_PARAMETER = parameter("model", "name of the model; required if the server has several", type="string")


def chosen_model(asked: Iterable[tuple[str, str]]) -> str | None:
    """Return the model that a query names. Raises `ApiError` 400 if it names several."""
    names = [value for name, value in asked if name == "model"]
    if len(names) > 1:
        raise bad_request("model is given twice", "model")
    return names[0] if names else None


def one_of(name: str, text: str | None, known: tuple[str, ...]) -> str | None:
    """Return the value of a parameter, None if it is not given. Raises `ApiError` 400 for an unknown one."""
    if text is not None and text not in known:
        raise bad_request(f"{name} must be one of {', '.join(known)}, got {text[:20]!r}", name)
    return text


def integer(name: str, text: str, least: int, most: int) -> int:
    """Return the value of a parameter. Raises `ApiError` 400 for what is no integer within the bounds."""
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and least <= int(text) <= most):
        raise bad_request(f"{name} must be an integer within [{least}, {most}], got {text[:20]!r}", name)
    return int(text)


def limit_of(text: str | None, default: int, most: int) -> int:
    """Return the length of a page. Raises `ApiError` 400 that names `limit`."""
    return default if text is None else integer("limit", text, 1, most)
