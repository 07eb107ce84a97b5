"""Typed errors. A user's mistake ends one request; an engine failure ends every open one."""


class RoseinferError(Exception):
    """Base of every error that roseinfer raises on purpose."""


class InvalidRequestError(RoseinferError, ValueError):
    """The request itself is wrong: the caller must change it.

    `param` names the offending field as the user wrote it, `code` is a short machine-readable reason.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class RequestTooLongError(InvalidRequestError):
    """The request can never run: longer than the context, or than the whole KV cache.

    `max_model_len`: the context, if that is too short. `prompt_tokens`: what the prompt has at least, if it is known.
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
    """The checkpoint asks for something that is not implemented; the message names the field."""


class ModelNotFoundError(RoseinferError):
    """MODEL is neither embedded, nor a folder, nor reachable on the hub."""


class ConfigError(RoseinferError, ValueError):
    """Two options contradict each other or one is out of range; the message names the option."""


class EngineClosedError(RoseinferError):
    """The engine was closed by its owner; nothing can be added any more."""


class ResourceError(RoseinferError):
    """The machine, or a limit set for this process, lacks what is needed: descriptors, memory, a temporary folder."""


class EngineDeadError(RoseinferError):
    """The engine failed; every open request ends with this."""


class EngineUnavailableError(RoseinferError):
    """No engine takes requests just now. `retry_s`: seconds after which one is expected to."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class TooManyInflightError(RoseinferError):
    """The engine holds as many requests as it was told to; try again when one has ended."""


class RequestFailedError(RoseinferError):
    """This one request failed inside the engine; the others go on."""


class EngineLostError(RequestFailedError):
    """Engines ended while they computed this request, which is not tried again: it may be what ends them."""


# How the reasons of such failures begin on their way from the runner, where they are text.
NO_TOKEN_ALLOWED = "no token is allowed next: "
CONSTRAINT_TOO_SLOW = "the output's constraint takes too much of the engine's time: "


class NoTokenAllowedError(RequestFailedError):
    """What the request asks of its output allows no token to come next, or none that can be found: the caller must
    ask for something else.
    """


class ConstraintTooSlowError(RequestFailedError):
    """The constraint takes so long for each token that other requests would wait: the caller must ask for less."""


def request_failure(reason: str) -> RequestFailedError:
    """The error of a request that ended for this reason."""
    if reason.startswith(NO_TOKEN_ALLOWED):
        return NoTokenAllowedError(reason)
    return (ConstraintTooSlowError if reason.startswith(CONSTRAINT_TOO_SLOW) else RequestFailedError)(reason)


class TokenizerFailedError(RoseinferError):
    """The tokenizer failed on the text or the tokens of this one request: a bug of its library, or of its file."""


class OutputTextError(RequestFailedError):
    """The tokens of this one request could not be turned into text: the tokenizer failed on them."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"the output could not be turned into text: {type(cause).__name__}: {cause}"[:500])
