"""`serve --ssl-*`: HTTPS with one and with several API processes, certificates of clients, and unusable files."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from roseinfer.cli.terminal.remote import Remote, UnreachableError
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.integrations.certificates import CertificateAuthority
from roseinfer.server.http.tls import server_tls
from tests.server.real_server import PATIENCE_S, RealServer, priced

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `ca.crt`, `tls.crt` and `tls.key` for 127.0.0.1, which is also a client's certificate."""
    folder = tmp_path_factory.mktemp("tls")
    CertificateAuthority.create().issue(["127.0.0.1"], valid_days=1).write(folder)
    return folder


def client_context(files: Path, *, certificate: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files / "ca.crt"))
    if certificate:
        context.load_cert_chain(files / "tls.crt", files / "tls.key")
    return context


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def server(request: pytest.FixtureRequest, files: Path) -> Iterator[RealServer]:
    options = ["--api-workers", str(request.param), *priced(files), "--root-path", "/llm"]
    options += ["--ssl-certfile", str(files / "tls.crt"), "--ssl-keyfile", str(files / "tls.key")]
    options += ["--ssl-ca-certs", str(files / "ca.crt"), "--ssl-cert-reqs", "2"]
    with RealServer(*options, verify=client_context(files, certificate=True)) as running:
        yield running


def test_answers_and_streams_are_encrypted(server):
    assert server.url.startswith("https://")
    whole = server.http.post("/v1/completions", json=BODY)
    assert whole.status_code == 200 and whole.json()["usage"]["completion_tokens"] == 20
    with server.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 10


def test_the_path_of_a_proxy_is_optional(server):
    assert server.http.get("/llm/health").status_code == server.http.get("/health").status_code == 200


def test_commands_say_where_a_ca_is_named(server):
    with pytest.raises(
        UnreachableError, match=r"certificate verify failed: .* \(name its CA's file in SSL_CERT_FILE\)"
    ):
        Remote(server.url).models()


def test_a_client_without_a_certificate_is_not_served(server, files):
    with httpx.Client(base_url=server.url, verify=client_context(files)) as client, pytest.raises(httpx.HTTPError):
        client.get("/health")
    assert server.http.get("/health").status_code == 200


def test_what_is_not_tls_ends_its_own_connection(server):
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    with socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        received = connection.recv(100)
        assert not received.startswith(b"HTTP/1.1 200")
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in server.log()


def test_unusable_files_are_named(files, tmp_path):
    crt, key, text = str(files / "tls.crt"), str(files / "tls.key"), tmp_path / "text.pem"
    text.write_text("no certificate")
    for options, said in (
        ({"ssl_certfile": "/none.pem"}, "ssl_certfile: cannot use '/none.pem': No such file or directory"),
        ({"ssl_certfile": str(text)}, "ssl_certfile: cannot use"),
        ({"ssl_certfile": crt}, "certificate and its private key in PEM; or name the key's file with --ssl-keyfile"),
        (
            {"ssl_certfile": key, "ssl_keyfile": crt},
            "first must have a certificate, the second its private key, in PEM",
        ),
        ({"ssl_certfile": crt, "ssl_keyfile": str(text)}, "with the key"),
        ({"ssl_certfile": crt, "ssl_keyfile": key, "ssl_ca_certs": "/none"}, "ssl_ca_certs: cannot use '/none'"),
        ({"ssl_certfile": crt, "ssl_keyfile": key, "ssl_ciphers": "ROT13"}, "no cipher is known in 'ROT13'"),
    ):
        with pytest.raises(ConfigError, match=said):
            server_tls(ServerConfig(**options))
    assert server_tls(ServerConfig()) is None


@pytest.mark.parametrize(
    "options",
    [
        {"ssl_keyfile": "key.pem"},
        {"ssl_certfile": "crt.pem", "ssl_cert_reqs": 2},
        {"ssl_certfile": "crt.pem", "ssl_cert_reqs": 3},
        {"root_path": "llm"},
        {"root_path": "/"},
        {"host": ""},
        {"host": " "},
    ],
)
def test_options_that_do_not_fit(options):
    with pytest.raises(ConfigError, match=next(reversed(options))):
        ServerConfig(**options)
