"""What one request may cost before it is refused, and the reading of bodies under these limits."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from roseinfer.core.config import ServerConfig
from roseinfer.server.http.errors import bad_request, body_too_large, body_too_slow
from roseinfer.server.http.wire import EXTENSION, Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes in bytes, characters or entries; times in seconds. `max_logprobs` -1 = no limit.

    `max_total_tokens` bounds n x (prompt + max_tokens), summed over the prompts of a request.
    """

    max_body_bytes: int
    max_prompts: int
    max_choices: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024
    max_total_tokens: int = 2**23
    max_warnings: int = 32
    max_header_count: int = 256
    max_header_bytes: int = 2**20
    header_timeout_s: float = 15.0
    body_timeout_s: float = 60.0

    @property
    def max_sequences(self) -> int:
        """Bound of n x prompts."""
        return max(self.max_prompts, self.max_choices)

    @classmethod
    def of(cls, config: ServerConfig) -> "Limits":
        return cls(
            max_body_bytes=config.max_body_bytes,
            max_prompts=config.max_prompts,
            max_choices=config.max_choices,
            max_logprobs=config.max_logprobs,
            max_stop_strings=config.max_stop_strings,
        )


async def read_json(scope: Scope, receive: Receive, limits: Limits) -> dict[str, Any]:
    """The body as a JSON object.

    Raises `ApiError` 400 (not JSON, not an object, wrong content type), 408 (too slow) or 413 (too large, noticed
    from Content-Length or while reading), and `ClientDisconnect`.
    """
    headers = dict(scope["headers"])
    _check_content_type(headers.get(b"content-type", b""))
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise body_too_large(limits.max_body_bytes)
    wire: Wire = scope["extensions"][EXTENSION]
    if wire.arrived:  # as most bodies are by now: nothing to wait for
        return _parse_object(await _read_body(receive, limits.max_body_bytes))
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return _parse_object(await _read_body(receive, limits.max_body_bytes))
    except TimeoutError:
        raise body_too_slow(limits.body_timeout_s) from None


def _check_content_type(value: bytes) -> None:
    kind = value.partition(b";")[0].strip().lower()
    if kind and kind != b"application/json" and not kind.endswith(b"+json"):
        raise bad_request("The content type must be application/json", "Content-Type")


async def _read_body(receive: Receive, limit: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        with _no_collection():
            value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object")
    return value


@contextmanager
def _no_collection() -> Iterator[None]:
    """A body of millions of small lists would set off one full garbage collection after the other."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
