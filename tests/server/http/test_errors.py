"""Errors of one request as clients see them."""

from roseinfer.core.errors import (
    ADAPTER_UNREADABLE,
    CONSTRAINT_FAILED,
    CONSTRAINT_TOO_SLOW,
    NO_TOKEN_ALLOWED,
    request_failure,
)
from roseinfer.server.http.errors import as_api_error


def test_errors_of_a_constraint_are_client_errors() -> None:
    slow = as_api_error(request_failure(f"{CONSTRAINT_TOO_SLOW}details of the engine"))
    assert (slow.status, slow.code) == (400, "constraint_too_slow")
    assert "smaller n" in slow.message and "details of the engine" not in slow.message
    assert as_api_error(request_failure(f"{NO_TOKEN_ALLOWED}why")).code == "no_token_allowed"
    failed = as_api_error(request_failure(f"{CONSTRAINT_FAILED}lexer error: too many expressions constructed"))
    assert (failed.status, failed.code) == (400, "no_token_allowed")
    assert "simpler schema, regex or grammar" in failed.message and "allowed tokens" not in failed.message
    assert as_api_error(request_failure("something else")).status == 500


def test_an_unreadable_adapter_is_named_without_its_path() -> None:
    error = as_api_error(request_failure(f"{ADAPTER_UNREADABLE}'poet': /srv/poet holds no adapter_model.safetensors"))
    assert (error.status, error.code, error.param) == (400, "adapter_not_loaded", "model")
    assert "/srv" not in error.message
