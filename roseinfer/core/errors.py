"""Typed errors. A user's mistake ends one request; an engine failure ends all of its requests."""


class RoseinferError(Exception):
    """Base of all errors that roseinfer raises on purpose."""


class InvalidRequestError(RoseinferError, ValueError):
    """Invalid request that the caller must change.

    `param` names the offending field as the user wrote it. `code` is a short machine-readable reason.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class RequestTooLongError(InvalidRequestError):
    """Request that can never run: longer than the context or than the whole KV cache.

    `max_model_len`: the context in tokens, if that is the limit. `prompt_tokens`: minimum length of the prompt, if
    known.
    """

    def __init__(
        self,
        message: str,
        param: str | None = "prompt",
        max_model_len: int | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param, "context_length_exceeded")
        self.max_model_len = max_model_len
        self.prompt_tokens = prompt_tokens


class UnsupportedModelError(RoseinferError):
    """Checkpoint that needs an unimplemented feature; the message names the config field."""


class ModelNotFoundError(RoseinferError):
    """MODEL is neither embedded, nor a folder, nor found on the hub."""


class ConfigError(RoseinferError, ValueError):
    """Invalid or contradicting options; the message names the option."""


class EngineClosedError(RoseinferError):
    """The engine's owner has closed it; it accepts no more requests."""


class ResourceError(RoseinferError):
    """Missing resource of this machine or process: descriptors, memory or a temporary folder."""


class EngineDeadError(RoseinferError):
    """The engine failed. Ends requests that cannot continue on another engine. `retry_s`: seconds until an engine is
    expected to accept requests; None if unknown.
    """

    def __init__(self, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class EngineUnavailableError(RoseinferError):
    """No engine accepts requests at present. `retry_s`: seconds until one is expected to."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class TooManyInflightError(RoseinferError):
    """The engine has reached its limit of requests; retry when one has ended."""


class TooManyReadsError(RoseinferError):
    """The engine reads as many LoRA adapters as it may; retry when it has read one."""


class RequestFailedError(RoseinferError):
    """One request failed inside the engine; other requests continue."""


class EngineLostError(RequestFailedError):
    """Engines crashed while they held this request. It gets no other engine, because it may have caused the crashes.

    `only_suspect`: no other request can have caused the crash. `retry_s`: as of `EngineDeadError`.
    """

    def __init__(self, message: str, *, only_suspect: bool = False, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.only_suspect = only_suspect
        self.retry_s = retry_s


# Prefixes by which `request_failure` recognises errors that the engine reports as text.
NO_TOKEN_ALLOWED = "no token is allowed next: "
CONSTRAINT_TOO_SLOW = "the output's constraint takes too much of the engine's time: "
CONSTRAINT_FAILED = "the output's constraint cannot be continued: "
ADAPTER_UNREADABLE = "LoRA adapter cannot be read: "


class NoTokenAllowedError(RequestFailedError):
    """The constraints of this request's output allow no next token, or none was found; the caller must change them."""


class ConstraintTooSlowError(RequestFailedError):
    """The constraint takes so long per token that other requests would wait; the caller must simplify it."""


class ConstraintFailedError(RequestFailedError):
    """The grammar library cannot continue the constraint, mostly because of its size; the caller must simplify it."""


class AdapterUnreadableError(RequestFailedError):
    """The files of the request's LoRA adapter are gone or have changed; somebody must load it again."""


_FAILURES = {
    NO_TOKEN_ALLOWED: NoTokenAllowedError,
    CONSTRAINT_TOO_SLOW: ConstraintTooSlowError,
    CONSTRAINT_FAILED: ConstraintFailedError,
    ADAPTER_UNREADABLE: AdapterUnreadableError,
}


def request_failure(reason: str) -> RequestFailedError:
    """Return the error for a request that failed for this reason."""
    kinds = (kind for prefix, kind in _FAILURES.items() if reason.startswith(prefix))
    return next(kinds, RequestFailedError)(reason)


class TokenizerFailedError(RoseinferError):
    """The tokenizer failed on the text or tokens of this request: a bug in its library or its file."""


class OutputTextError(RequestFailedError):
    """The tokenizer failed to decode the output of this request."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"cannot decode the output: {type(cause).__name__}: {cause}"[:500])


def reason_of(error: object) -> str:
    """Return what went wrong in a call of the system, without its number and path; of other errors, their text."""
    return getattr(error, "strerror", None) or str(error)
