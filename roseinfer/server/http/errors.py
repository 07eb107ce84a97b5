"""Errors of the API: `{"error": {"message", "type", "param", "code"}}` with a status and retry advice."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from roseinfer.core.errors import (
    AdapterUnreadableError,
    ConstraintFailedError,
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
    TooManyReadsError,
)
from roseinfer.core.pooling import PoolingTask
from roseinfer.core.slo import Rejection, suggested_ms

log = logging.getLogger(__name__)

# Status of a request whose client has gone. No client reads it; it is for the metrics.
CLIENT_CLOSED_REQUEST = 499
MAX_MESSAGE_CHARS = 1000
# OpenAI clients do not retry after a longer wait.
MAX_RETRY_S = 60.0
# Statuses below 500 with which OpenAI's and Anthropic's clients send a request again.
RETRYABLE_STATUSES = frozenset({408, 409, 429})
DROPPED_REASON = "x-llm-d-request-dropped-reason"
# Retry advice for a rejected body: until then, others will have arrived.
TOO_MANY_BODIES_S = 1.0
READS_RETRY_S = 1.0  # likewise, for adapters that are being read
DRAINING_RETRY_S = 5.0


class ApiError(RoseinferError):
    """Error response.

    `retry_after_s` becomes `Retry-After`. `should_retry` becomes `x-should-retry`, which OpenAI clients obey; None
    leaves the decision to the status, by which these clients decide alike. `closes` ends the connection after the
    answer. `more` and `more_headers` are added to the error's fields and to the headers.
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

    @property
    def retryable(self) -> bool:
        """True if the same request may be sent again, and may then succeed."""
        if self.should_retry is not None:
            return self.should_retry
        return self.status >= 500 or self.status in RETRYABLE_STATUSES

    def advice(self) -> dict[str, bool | int]:
        """Return the fields that say whether, and after how many seconds, to send the request again.

        Headers say the same, but a stream that has begun can only send fields.
        """
        fields: dict[str, bool | int] = {"retryable": self.retryable}
        if self.retryable and self.retry_after_s is not None:
            fields["retry_after_s"] = whole_seconds(self.retry_after_s)
        return fields

    def body(self) -> bytes:
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": {**fields, **self.more, **self.advice()}})

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(whole_seconds(self.retry_after_s))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.closes:
            headers["Connection"] = "close"
        return {**headers, **self.more_headers}


def whole_seconds(seconds: float) -> int:
    """Return a wait as `Retry-After` can express it."""
    return max(1, math.ceil(seconds))


@dataclass(frozen=True, slots=True)
class Dialect:
    """Conventions of one API: the format of errors, and the headers with the request's id."""

    error_body: Callable[[ApiError], bytes]
    id_headers: tuple[bytes, ...]


OPENAI = Dialect(ApiError.body, (b"x-request-id",))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str, served: Sequence[str]) -> ApiError:
    """Return 404. `served`: the names of the models of this server."""
    return ApiError(
        404,
        f"The model {name[:100]!r} does not exist; available: {', '.join(repr(name[:100]) for name in served[:4])}",
        type="not_found_error",
        param="model",
        code="model_not_found",
    )


_TASKS = {
    None: "it generates text (use /v1/chat/completions or /v1/completions)",
    PoolingTask.EMBED: "it makes embeddings (use /v1/embeddings)",
    PoolingTask.SCORE: "it scores pairs of texts (use /rerank or /score)",
}


def unsupported_task(model: str, path: str, task: PoolingTask | None) -> ApiError:
    """Return 400 for a route of another kind of model. `task`: of this one, None = it generates text."""
    message = f"The model {model[:100]!r} does not support {path}: {_TASKS[task]}"
    return bad_request(message, "model", "unsupported_task")


def invalid_api_key() -> ApiError:
    return ApiError(401, "Missing or wrong API key", type="authentication_error", code="invalid_api_key")


def host_not_allowed(host: str) -> ApiError:
    message = (
        f"Host {host[:100]!r} is not allowed: a server without an API key accepts localhost, IP addresses and the "
        "names in --allowed-hosts"
    )
    return ApiError(403, message, type="permission_error", param="Host", code="host_not_allowed")


def origin_not_allowed(origin: str) -> ApiError:
    message = f"Origin {origin[:100]!r} is not allowed: without an API key it must be named in --allowed-origins"
    return ApiError(403, message, type="permission_error", param="Origin", code="origin_not_allowed")


def adapters_fixed() -> ApiError:
    message = "LoRA adapters cannot be loaded or dropped while the server runs: start it with --lora-dir"
    return ApiError(403, message, type="permission_error", code="adapters_fixed")


def not_json(content_type: str) -> ApiError:
    """Return 415. The body is not read."""
    given = f"not {content_type[:100]!r}" if content_type else "but the header is missing"
    message = f"Content-Type must be application/json, {given}"
    return ApiError(415, message, param="Content-Type", code="unsupported_media_type")


def compressed_body(coding: str) -> ApiError:
    """Return 415. The body is not read."""
    message = f"Content-Encoding {coding[:100]!r} is not supported: send the body uncompressed"
    return ApiError(415, message, param="Content-Encoding", code="unsupported_media_type")


def head_too_large(message: str) -> ApiError:
    return ApiError(431, message, code="head_too_large", closes=True)


def too_many_values(limit: int, what: str) -> ApiError:
    message = f"The request body has more than {limit} {what}"
    return ApiError(413, message, code="too_many_values")


def body_too_large(limit: int) -> ApiError:
    message = f"The request body is larger than {limit} bytes (--max-body-bytes)"
    return ApiError(413, message, code="request_too_large", closes=True)


def body_too_slow(seconds: float) -> ApiError:
    message = f"The request body did not arrive within {seconds:.3g} s"
    return ApiError(408, message, code="request_timeout", closes=True)


def too_many_bodies() -> ApiError:
    """Return 503, which closes the connection: the rest of the body is not read."""
    message = "Too many request bodies are being read"
    return ApiError(
        503, message, type="overloaded_error", code="too_many_bodies", retry_after_s=TOO_MANY_BODIES_S, closes=True
    )


def unavailable(code: str, message: str, retry_after_s: float, should_retry: bool | None = None) -> ApiError:
    """Return 503 with one of the codes queue_full, draining, loading, engine_unhealthy or metrics_unavailable."""
    return ApiError(
        503,
        message,
        type="overloaded_error",
        code=code,
        retry_after_s=retry_after_s,
        should_retry=should_retry,
    )


def draining() -> ApiError:
    return unavailable("draining", "The server is shutting down", DRAINING_RETRY_S)


def no_engine_accepts(retry_after_s: float) -> ApiError:
    """Return 503: all engines are dead, drain or are unresponsive."""
    return unavailable("engine_unhealthy", "No engine accepts requests at the moment", retry_after_s)


def too_many_inflight(message: str, retry_after_s: float) -> ApiError:
    """Return 429 for a request above the operator's limit."""
    return ApiError(429, message, type="overloaded_error", code="too_many_inflight", retry_after_s=retry_after_s)


class SloUnattainable(ApiError):
    """Error 429: the scheduler rejected the request before its first token, since it cannot meet the objectives."""

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
    """Return the attainable objective, rounded up so that a retry with it does not fail by the rounding."""
    least_s = rejection.attainable_s
    return None if least_s is None or not math.isfinite(least_s) else math.ceil(least_s * 1e6) / 1000


def _why_unattainable(rejection: Rejection, predicted_s: float | None) -> str:
    where = "even on an idle server" if rejection.hopeless else "under the present load"
    message = f"The request's {rejection.reason.upper()} objective cannot be met {where}"
    attainable_ms = _attainable_ms(rejection)
    if attainable_ms:  # the expected first token is earlier: it has no margin, and would be a second number
        return f"{message}: {suggested_ms(attainable_ms):g} ms could be met now"
    if predicted_s is None or rejection.reason != "ttft":
        return message
    return f"{message}: the first token would come after {predicted_s * 1000:.1f} ms"


def deadline_exceeded() -> ApiError:
    """Return 504: the time limit expired before the first token. A retry would take even longer."""
    message = "The request's time limit expired before its first token"
    return ApiError(504, message, type="timeout_error", code="deadline_exceeded", should_retry=False)


def internal_error() -> ApiError:
    return ApiError(500, "The server failed on this request", type="server_error", code="internal_error")


def engine_failed(retry_s: float | None) -> ApiError:
    """Return 500: the engine died."""
    message = "The engine failed while this request ran"
    return ApiError(500, message, type="server_error", code="engine_dead", retry_after_s=retry_s)


def engine_lost(error: EngineLostError) -> ApiError:
    """Return 500. Without retry if the request is the only one that can have crashed the engine."""
    if error.only_suspect:
        message = "The engine failed on this request alone: do not send it again"
        return ApiError(500, message, type="server_error", code="engine_lost", should_retry=False)
    message = "Several engines failed while this request ran"
    return ApiError(500, message, type="server_error", code="engine_lost", retry_after_s=error.retry_s)


def as_api_error(error: Exception) -> ApiError:
    """Return the error for the client. Messages from inside the engine stay in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return bad_request(error.message, error.param, error.code)
    if isinstance(error, TooManyReadsError):
        text, code = str(error), "too_many_adapter_loads"
        return ApiError(429, text, type="overloaded_error", code=code, retry_after_s=READS_RETRY_S)
    if isinstance(error, EngineDeadError):
        return engine_failed(error.retry_s)
    if isinstance(error, EngineUnavailableError):
        return no_engine_accepts(error.retry_s)
    if isinstance(error, EngineClosedError):
        return draining()
    if isinstance(error, OutputTextError):
        message = "The output's tokens could not be decoded to text"
        return ApiError(500, message, type="server_error", code="output_not_text", should_retry=False)
    if isinstance(error, TokenizerFailedError):
        log.error("%s", error)
        message = "The tokenizer failed on this request"
        return ApiError(500, message, type="server_error", code="tokenizer_failed", should_retry=False)
    if isinstance(error, NoTokenAllowedError):
        message = "No next token is possible: the request's allowed tokens and its constraint exclude all"
        return bad_request(message, code="no_token_allowed")
    if isinstance(error, ConstraintFailedError):
        simpler = "use a smaller or simpler schema, regex or grammar"
        message = f"The grammar library cannot continue the output's constraint: {simpler}"
        return bad_request(message, code="no_token_allowed")
    if isinstance(error, ConstraintTooSlowError):
        message = (
            "The output's constraint takes too much of the engine's time: use a smaller or simpler schema or grammar, "
            "or a smaller n"
        )
        return bad_request(message, code="constraint_too_slow")
    if isinstance(error, AdapterUnreadableError):
        message = "The files of the request's LoRA adapter are gone or have changed: load it again"
        return bad_request(message, "model", "adapter_not_loaded")
    if isinstance(error, EngineLostError):
        return engine_lost(error)
    if isinstance(error, RequestFailedError):
        message = "The engine could not complete this request"
        return ApiError(500, message, type="server_error", code="request_failed")
    return internal_error()
