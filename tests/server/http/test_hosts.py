"""Allowed hosts and origins of a server without a key."""

from collections.abc import Callable

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from tests.server.live import LiveServer

Serve = Callable[..., LiveServer]
OPEN = ["/health", "/ready", "/ping", "/metrics"]


def answer(server: LiveServer, path: str = "/v1/models", **headers: str) -> tuple[int, str | None]:
    """Return the status and the error code of a GET."""
    with server.client() as client:
        response = client.get(path, headers=headers)
    return response.status_code, None if response.status_code == 200 else response.json()["error"]["code"]


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LocalHost", "localhost:8000", "localhost:", "127.0.0.1", "127.0.0.1:1", "192.168.7.9:8000"),
        *("[::1]", "[::1]:8000", "[fe80::1]", "0.0.0.0:8000"),
    ],
)
def test_localhost_and_addresses_are_allowed(server: LiveServer, host: str) -> None:
    assert answer(server, Host=host) == (200, None)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8000",
            "evil.example:80",
            "",
            "::1",
            "1.2.3",
        ),
        *("[::1].evil.example", "[evil]", "localhost:8000:80", "localhost@evil", "evil.example#localhost", "256.1.1.1"),
    ],
)
def test_other_names_are_rejected(server: LiveServer, host: str) -> None:
    assert answer(server, Host=host) == (403, "host_not_allowed")
    with server.client() as client:
        refused = client.post("/v1/completions", json={"prompt": "x"}, headers={"Host": host})
    assert refused.status_code == 403 and "--allowed-hosts" in refused.json()["error"]["message"]
    assert refused.headers["x-request-id"] and refused.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("path", OPEN)
def test_open_paths_are_for_any_host(server: LiveServer, path: str) -> None:
    assert answer(server, path, Host="roseinfer.default.svc", Origin="http://evil.example") == (200, None)


def test_names_that_are_allowed(serve: Serve) -> None:
    server = serve(allowed_hosts=("Roseinfer", "*.svc.cluster.local"), host="gpu-box")
    for host in ("roseinfer", "ROSEINFER:8000", "a.svc.cluster.local:80", "a.b.svc.cluster.local", "gpu-box:8000"):
        assert answer(server, Host=host) == (200, None), host
    for host in ("svc.cluster.local", "x.roseinfer", "evilsvc.cluster.local", "gpu-box.example"):
        assert answer(server, Host=host) == (403, "host_not_allowed"), host


def test_any_name(serve: Serve) -> None:
    assert answer(serve(allowed_hosts=("*",)), Host="evil.example") == (200, None)


@pytest.mark.parametrize("name", ["", "http://x", "x:8000", "a b", "*x", "a/b", "*.", "a*.b"])
def test_invalid_names(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts: "):
        ServerConfig(allowed_hosts=(name,))


@pytest.mark.parametrize(
    "origin", ["", "ui.example", "ui:3000", "http://ui/", "http://ui/x", "http://a,http://b", "http://*"]
)
def test_origins_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(
        ConfigError, match=r"allowed_origins: invalid origin .* \(expected '\*', 'null' or scheme://host"
    ):
        ServerConfig(allowed_origins=(origin,))


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "file://", "http://ui", "https://ui.example:3000", "chrome-extension://abc", "HTTP://[::1]:1"],
)
def test_origins_that_browsers_send(origin: str) -> None:
    assert ServerConfig(allowed_origins=(origin,)).allowed_origins == (origin,)


def test_the_server_s_own_origin_is_allowed(server: LiveServer) -> None:
    own = f"127.0.0.1:{server.port}"
    assert answer(server, Host=own, Origin=f"http://{own}") == (200, None)
    assert answer(server, Host="localhost", Origin="https://LOCALHOST") == (200, None)


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example", "null", "http://127.0.0.1", "http://localhost:{port}", "http://127.0.0.1:{port}0", ""),
        *("file://127.0.0.1:{port}", "127.0.0.1:{port}", "http://127.0.0.1:{port}.evil.example"),
    ],
)
def test_other_origins_are_rejected(server: LiveServer, origin: str) -> None:
    headers = {"Origin": origin.format(port=server.port)}
    assert answer(server, **headers) == (403, "origin_not_allowed")
    with server.client() as client:
        refused = client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert refused.status_code == 403 and "--allowed-origins" in refused.json()["error"]["message"]
        assert "access-control-allow-origin" not in refused.headers
        preflight = client.options("/v1/completions", headers={**headers, "Access-Control-Request-Method": "POST"})
        assert preflight.status_code == 403
    assert server.call(lambda: server.engine.requests) == []


def test_origins_that_are_allowed(serve: Serve) -> None:
    server = serve(allowed_origins=("http://ui",))
    with server.client() as client:
        preflight = {"Origin": "http://ui", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/completions", headers=preflight).status_code == 200
        taken = client.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": "http://ui"})
        assert taken.status_code == 200 and taken.headers["access-control-allow-origin"] == "http://ui"
    assert answer(server, Origin="http://evil.example") == (403, "origin_not_allowed")
    assert answer(serve(allowed_origins=("*",)), Origin="http://evil.example") == (200, None)


def test_with_a_key_neither_is_checked(serve: Serve) -> None:
    server = serve(api_key=("k",))
    headers = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert answer(server, Authorization="Bearer k", **headers) == (200, None)
    assert answer(server, **headers) == (401, "invalid_api_key")
