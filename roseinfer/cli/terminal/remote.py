"""Client of OpenAI-compatible servers that uses the standard library only."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ssl import SSLCertVerificationError
from typing import Any
from urllib.parse import urlsplit

from roseinfer.core.errors import ConfigError, RoseinferError, reason_of

KEY_VARIABLE = "ROSEINFER_API_KEY"
TIMEOUT_S = 600.0  # default of the openai package
MAX_ERROR_BYTES = 2**20


class RemoteError(RoseinferError):
    """The server did not do what the client asked for."""


class UnreachableError(RemoteError):
    """The server cannot be reached, or the connection was lost."""


class RefusedError(RemoteError):
    """HTTP answer other than success. `error` holds the fields of the body's `error`."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        how = "the answer failed" if status == 200 else f"rejected ({status})"
        super().__init__(f"{how}: {error.get('message') or 'the server gave no reason'}")
        self.status = status
        self.error = error

    @property
    def code(self) -> str | None:
        return self.error.get("code")


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


class Remote:
    """One server. `url` may end in `/v1`. Each call opens its own connection; proxies are not used.

    Raises `ConfigError` for an invalid URL or a key that cannot be sent.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        try:
            parts = urlsplit(url)
            self._address = (parts.hostname or "", parts.port)
        except ValueError as error:
            raise ConfigError(f"url: {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise ConfigError(f"url: invalid URL {url!r} (expected http://host:port)")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError("api_key contains characters that a header cannot carry")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._path = urlsplit(self.url).path
        self._connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def text(self, path: str) -> str:
        """Return the body of a GET. Raises `UnreachableError`, `RefusedError`."""
        with closing(self._connection()) as connection:
            try:
                return self._ask(connection, "GET", path).read().decode("utf-8", "replace")
            except (OSError, HTTPException) as error:
                raise self._lost(error) from error

    def json(self, path: str) -> Any:
        """Return the parsed body of a GET. Raises `UnreachableError`, `RefusedError`, and `RemoteError` for invalid
        JSON.
        """
        text = self.text(path)
        try:
            return json.loads(text)
        except ValueError as error:
            raise RemoteError(f"the answer of {self.url}{path} is not JSON") from error

    def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed answer up to `[DONE]`. Closing the iterator cancels the request.

        Raises `UnreachableError`, also if the stream ends without `[DONE]`; `RefusedError`, also for an error event.
        """
        with closing(self._connection()) as connection:
            try:
                yield from self._events(self._ask(connection, "POST", path, {**body, "stream": True}, headers or {}))
            except (OSError, HTTPException) as error:
                raise self._lost(error) from error

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the served models: their names with what the server says about each."""
        listed = self.json("/v1/models")
        cards = listed.get("data") if isinstance(listed, dict) else None
        return {str(card["id"]): card for card in cards or [] if isinstance(card, dict) and "id" in card}

    def _connection(self) -> HTTPConnection:
        host, port = self._address
        return self._connect(host, port, timeout=self._timeout_s)

    def _ask(
        self, connection: HTTPConnection, method: str, path: str, body: Any = None, more: Mapping[str, str] = {}
    ) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, **({} if data is None else {"Content-Type": "application/json"}), **more}
        connection.request(method, self._path + path, data, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RefusedError(response.status, _error_of(response.read(MAX_ERROR_BYTES)))
        return response

    def _events(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError as error:
                raise RemoteError(f"an event of {self.url} is not JSON") from error
            if not isinstance(event, dict):
                raise RemoteError(f"an event of {self.url} is not a JSON object")
            if event.get("error") is not None:
                raise RefusedError(response.status, _fields(event["error"]))
            yield event
        raise UnreachableError(f"{self.url} closed the connection before the end of the answer")

    def _lost(self, error: Exception) -> UnreachableError:
        reason = reason_of(error) or type(error).__name__
        if isinstance(error, SSLCertVerificationError):
            reason = f"certificate verify failed: {error.verify_message} (name its CA's file in SSL_CERT_FILE)"
        if isinstance(error, ConnectionRefusedError):
            reason += " (start a server there, for example with `roseinfer serve`)"
        return UnreachableError(f"cannot reach {self.url}: {reason}")


def given_key(key: str | None) -> str | None:
    """Return the API key of the option, else of the environment."""
    return key or os.environ.get(KEY_VARIABLE) or None


def _error_of(body: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        text = body[:200].decode("utf-8", "replace").strip()
        is_page = text.lower().startswith(("<!doctype", "<html"))
        return {
            "message": "the answer is a web page (is this the URL of an OpenAI-compatible server?)" if is_page else text
        }
    return _fields(answer.get("error", answer)) if isinstance(answer, dict) else {}


def _fields(error: Any) -> Mapping[str, Any]:
    return error if isinstance(error, dict) else {"message": str(error)}
