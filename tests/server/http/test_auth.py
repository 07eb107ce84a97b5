"""API keys and CORS."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.server.http.auth import AuthMiddleware
from tests.server.live import LiveServer

Serve = Callable[..., LiveServer]
OPEN = ["/health", "/ready", "/ping", "/metrics"]
GUARDED = ["/v1/models", "/version", "/load", "/docs", "/openapi.json", "/nope", "/metrics/", "//health", "/health/x"]


@pytest.fixture
def keyed(serve: Serve) -> LiveServer:
    return serve(api_key=("first", "second"))


@pytest.mark.parametrize("key", ["first", "second"])
def test_any_of_the_keys(keyed: LiveServer, key: str) -> None:
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key=key, max_retries=0) as client:
        assert client.completions.create(model="fake", prompt="x").choices[0].text
        assert [model.id for model in client.models.list()] == ["fake"]


def test_wrong_keys(keyed: LiveServer) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer First"},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
        {"Authorization": "Bearer first second"},
    ):
        answer = keyed.post("/v1/completions", {"prompt": "x"}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
    assert keyed.status_with("authorization: Bearer ") == 401
    client = openai.OpenAI(base_url=keyed.url + "/v1", api_key="third")
    with client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_key_in_anthropics_header(keyed: LiveServer) -> None:
    """A bearer token has priority."""
    wrong = {"Authorization": "Bearer third"}
    for headers, status in (
        ({"x-api-key": "second"}, 200),
        ({"x-api-key": "second", "Authorization": "Bearer"}, 200),
        ({"x-api-key": "third"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "second", **wrong}, 401),
        ({"x-api-key": "third", "Authorization": "Bearer first"}, 200),
    ):
        assert keyed.post("/v1/completions", {"prompt": "x"}, headers=headers).status_code == status, headers


NO_TOKEN = ["Bearer", "Bearer ", "Bearer  \t ", "bearer ", "Bearer\t", ""]


@pytest.mark.parametrize("value", NO_TOKEN)
def test_an_empty_token_is_no_key(keyed: LiveServer, value: str) -> None:
    assert keyed.status_with(f"authorization: {value}") == 401


@pytest.mark.parametrize("value", NO_TOKEN)
def test_an_empty_token_is_never_accepted(value: str) -> None:
    """Not even if the server has an empty key, which the options reject."""
    passed = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["path"])

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            passed.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"authorization", value.encode())],
    }
    asyncio.run(AuthMiddleware(app, ("", "key"))(scope, None, send))  # type: ignore[arg-type]
    assert passed == [401]


@pytest.mark.parametrize("key", ["", " ", "two words", "end\n", "\x00"])
def test_keys_that_no_client_can_send_are_rejected_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key: ") as raised:
        ServerConfig(api_key=("real", key))
    assert "real" not in str(raised.value) and "words" not in str(raised.value)


@pytest.mark.parametrize("path", OPEN)
def test_open_paths(keyed: LiveServer, path: str) -> None:
    assert keyed.get(path).status_code == 200


@pytest.mark.parametrize("path", GUARDED)
def test_all_other_paths_need_a_key(keyed: LiveServer, path: str) -> None:
    with keyed.client() as client:
        assert client.get(keyed.url + path).status_code == 401
        misleading = {"Host": "x/health?", "X-Original-Url": "/health"}
        assert client.get(keyed.url + path, headers=misleading).status_code == 401
    with keyed.connect() as connection:  # a path in the absolute form
        connection.sendall(f"GET http://x/health{path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert b" 401 " in connection.recv(100)


def test_without_keys_the_header_is_ignored(server: LiveServer) -> None:
    for value in ("Bearer ", "Bearer x", "nonsense"):
        assert server.status_with(f"authorization: {value}") == 200


@pytest.fixture
def cors(serve: Serve) -> Iterator[LiveServer]:
    yield serve(allowed_origins=("http://ui",), api_key=("k",))


def test_cors_is_opt_in(cors: LiveServer, server: LiveServer) -> None:
    preflight = {"Origin": "http://ui", "Access-Control-Request-Method": "POST"}
    with cors.client() as client:
        answer = client.options("/v1/completions", headers=preflight)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://ui"
        refused = client.post("/v1/completions", json={}, headers={"Origin": "http://ui"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://ui"
        assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": "http://evil"}).headers
    assert "access-control-allow-origin" not in server.get("/health", headers={"Origin": "http://ui"}).headers
