"""Query parameters of routes."""

from roseinfer.server.http.errors import bad_request


def limit_of(text: str | None, default: int, most: int) -> int:
    """Return the length of a page. Raises `ApiError` 400 that names `limit`."""
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise bad_request(f"limit must be within [1, {most}], got {text[:20]!r}", "limit")
    return int(text)
