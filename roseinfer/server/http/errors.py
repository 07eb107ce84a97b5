"""Errors as they go over the wire: `{"error": {"message", "type", "param", "code"}}` with a status and retry advice."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from roseinfer.core.errors import (
    ConstraintTooSlowError,
    EngineClosedError,
    EngineDeadError,
    EngineLostError,
    EngineUnavailableError,
    InvalidRequestError,
    NoTokenAllowedError,
    OutputTextError,
    RequestFailedError,
    RoseinferError,
    TokenizerFailedError,
)
from roseinfer.core.slo import Rejection

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
# openai clients do not come back by themselves after a longer wait.
MAX_RETRY_S = 60.0
DROPPED_REASON = "x-llm-d-request-dropped-reason"
# After how long a client may find that others' bodies have arrived.
TOO_MANY_BODIES_S = 1.0


class ApiError(RoseinferError):
    """An answer other than success.

    `retry_after_s` becomes `Retry-After`; `should_retry` becomes `x-should-retry`, which openai clients obey (None
    leaves the decision to the client); `closes` ends the connection after the answer. `more` and `more_headers` are
    added to the error's fields and to the headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        closes: bool = False,
        more: Mapping[str, Any] | None = None,
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS]
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.closes = closes
        self.more = more or {}
        self.more_headers = more_headers or {}

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": {**fields, **self.more}})

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.closes:
            headers["Connection"] = "close"
        return {**headers, **self.more_headers}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What all answers of one API have in common: how errors are written, and in which headers the request's id is."""

    error_body: Callable[[ApiError], bytes]
    id_headers: tuple[bytes, ...]


OPENAI = Dialect(ApiError.body, (b"x-request-id",))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    """`served`: the names that there are."""
    return ApiError(
        404,
        f"The model {name[:100]!r} does not exist; there is {', '.join(repr(name[:100]) for name in served[:4])}",
        type="not_found_error",
        param="model",
        code="model_not_found",
    )


def invalid_api_key() -> ApiError:
    return ApiError(401, "Missing or wrong API key", type="authentication_error", code="invalid_api_key")


def host_not_allowed(host: str) -> ApiError:
    message = (
        f"Host {host[:100]!r} is not allowed: a server without an API key answers to localhost, IP addresses and the "
        "names in --allowed-hosts"
    )
    return ApiError(403, message, type="permission_error", param="Host", code="host_not_allowed")


def origin_not_allowed(origin: str) -> ApiError:
    message = f"Pages of {origin[:100]!r} may not use a server without an API key, unless --allowed-origins names them"
    return ApiError(403, message, type="permission_error", param="Origin", code="origin_not_allowed")


def not_json(content_type: str) -> ApiError:
    """415: the body is not read."""
    given = f"not {content_type[:100]!r}" if content_type else "and it is missing"
    message = f"Content-Type must be application/json, {given}"
    return ApiError(415, message, param="Content-Type", code="unsupported_media_type")


def head_too_large(message: str) -> ApiError:
    return ApiError(431, message, code="head_too_large", closes=True)


def too_many_values(limit: int, what: str) -> ApiError:
    message = f"The request body holds more than {limit} {what}"
    return ApiError(413, message, code="too_many_values")


def body_too_large(limit: int) -> ApiError:
    message = f"The request body is larger than {limit} bytes"
    return ApiError(413, message, code="request_too_large", closes=True)


def body_too_slow(seconds: float) -> ApiError:
    message = f"The request body did not arrive within {seconds:.3g} s"
    return ApiError(408, message, code="request_timeout", closes=True)


def too_many_bodies() -> ApiError:
    """503, with the connection closed: its body, which is still coming, is not read."""
    message = "Too many request bodies are being read"
    return ApiError(
        503, message, type="overloaded_error", code="too_many_bodies", retry_after_s=TOO_MANY_BODIES_S, closes=True
    )


def unavailable(code: str, message: str, retry_after_s: float, should_retry: bool | None = None) -> ApiError:
    """503: queue_full, draining, loading or engine_unhealthy."""
    return ApiError(
        503,
        message,
        type="overloaded_error",
        code=code,
        retry_after_s=retry_after_s,
        should_retry=should_retry,
    )


def too_many_inflight(message: str, retry_after_s: float) -> ApiError:
    """429: turned away on purpose, at the operator's limit."""
    return ApiError(429, message, type="overloaded_error", code="too_many_inflight", retry_after_s=retry_after_s)


class SloUnattainable(ApiError):
    """429: the scheduler turned the request away before its first token, since it could not keep what was promised."""

    def __init__(self, rejection: Rejection) -> None:
        predicted_s = rejection.predicted_ttft_s if math.isfinite(rejection.predicted_ttft_s) else None
        wait_s = min(max(predicted_s or 1.0, 0.001), MAX_RETRY_S)
        super().__init__(
            429,
            _why_unattainable(rejection, predicted_s),
            type="overloaded_error",
            code="slo_unattainable",
            retry_after_s=wait_s,
            should_retry=False if rejection.hopeless else None,
            more={
                "reason": rejection.reason,
                "cause": rejection.cause,
                "predicted_ttft_ms": None if predicted_s is None else round(predicted_s * 1000, 3),
                "attainable_ms": _attainable_ms(rejection),
            },
            more_headers={"retry-after-ms": str(math.ceil(wait_s * 1000)), DROPPED_REASON: "rejected-saturated"},
        )
        self.rejection = rejection


def _attainable_ms(rejection: Rejection) -> float | None:
    """Rounded up: one that asks for what it was told is not to fail by the rounding."""
    least_s = rejection.attainable_s
    return None if least_s is None or not math.isfinite(least_s) else math.ceil(least_s * 1e6) / 1000


def _why_unattainable(rejection: Rejection, predicted_s: float | None) -> str:
    where = "even on an idle server" if rejection.hopeless else "under the present load"
    message = f"The request's {rejection.reason.upper()} objective cannot be met {where}"
    if predicted_s is None or rejection.reason != "ttft":
        return message
    return f"{message}: the first token would come after {predicted_s * 1000:.1f} ms"


def deadline_exceeded() -> ApiError:
    """504: its time was over before its first token. Trying again would come later still."""
    message = "The request's time limit was over before its first token"
    return ApiError(504, message, type="timeout_error", code="deadline_exceeded", should_retry=False)


def internal_error() -> ApiError:
    return ApiError(500, "The server failed on this request", type="server_error", code="internal_error")


def engine_failed() -> ApiError:
    """The engine is gone, and it may have been this request that it did not survive: it should not come again."""
    message = "The engine failed while this request ran"
    return ApiError(500, message, type="server_error", code="engine_dead", should_retry=False)


def as_api_error(error: Exception) -> ApiError:
    """What the client is told of `error`. Texts from inside the engine stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return bad_request(error.message, error.param, error.code)
    if isinstance(error, EngineDeadError):
        return engine_failed()
    if isinstance(error, EngineUnavailableError):
        return unavailable("engine_unhealthy", "No engine takes requests just now", error.retry_s)
    if isinstance(error, EngineClosedError):
        return unavailable("draining", "The server is shutting down", 5.0)
    if isinstance(error, OutputTextError):
        message = "The tokens of the output could not be turned into text"
        return ApiError(500, message, type="server_error", code="output_not_text", should_retry=False)
    if isinstance(error, TokenizerFailedError):
        log.error("%s", error)
        message = "The tokenizer failed on this request"
        return ApiError(500, message, type="server_error", code="tokenizer_failed", should_retry=False)
    if isinstance(error, NoTokenAllowedError):
        message = "No token could come next: what the request allows and what its constraint allows leave none"
        return bad_request(message, code="no_token_allowed")
    if isinstance(error, ConstraintTooSlowError):
        message = (
            "The output's constraint takes too much of the engine's time: use a smaller or simpler schema or grammar, "
            "or a smaller n"
        )
        return bad_request(message, code="constraint_too_slow")
    if isinstance(error, EngineLostError):
        message = "Engines failed while this request ran: it is not tried again"
        return ApiError(500, message, type="server_error", code="engine_lost", should_retry=False)
    if isinstance(error, RequestFailedError):
        message = "The engine could not complete this request"
        return ApiError(500, message, type="server_error", code="request_failed")
    return internal_error()
