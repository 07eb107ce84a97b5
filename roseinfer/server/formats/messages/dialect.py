"""Error format and headers of Anthropic's API."""

from typing import Any

import orjson

from roseinfer.server.http.errors import ApiError, Dialect

# Error types of Anthropic by status; the nearest one where there is none.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(error: ApiError) -> str:
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    return _TYPES.get(error.status, default)


def error_body(error: ApiError) -> bytes:
    """`{"type": "error", "error": {"type", "message", "details"}}`.

    `details` has our `code` as `error_code`, where clients look for it, the field (`param`), why an objective was out
    of reach, and whether the request may be sent again.
    """
    named = {"error_code": error.code, "param": error.param, **error.more, **error.advice()}
    details = {name: value for name, value in named.items() if value is not None}
    fields: dict[str, Any] = {"type": error_type(error), "message": error.message, "details": details}
    return orjson.dumps({"type": "error", "error": fields})


ANTHROPIC = Dialect(error_body, (b"x-request-id", b"request-id"))
