"""The console's page and what belongs to it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from roseinfer.server.console.files import FOLDER, ConsoleFiles
from tests.server.live import LiveServer

Serve = Callable[..., LiveServer]


def test_every_file_is_there_with_its_type_and_under_a_policy(server: LiveServer) -> None:
    shown = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert {"index.html"} < shown
    for name in shown:
        answer = server.get(f"/console/{name}")
        assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes(), name
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        if name.endswith(".js"):
            assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    page = server.get("/")
    assert page.content == (FOLDER / "index.html").read_bytes()
    assert page.headers["content-type"] == "text/html; charset=utf-8"


def test_who_has_a_file_is_told_so(server: LiveServer) -> None:
    etag = server.get("/").headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        answer = server.get("/", headers={"If-None-Match": known})
        assert answer.status_code == 304 and not answer.content and answer.headers["etag"] == etag
        assert "content-security-policy" in answer.headers
    assert server.get("/", headers={"If-None-Match": '"other"'}).status_code == 200


def test_a_changed_file_has_another_tag(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("one")
    files = ConsoleFiles(tmp_path)
    known = Headers({"If-None-Match": files.answer("a.js", Headers()).headers["etag"]})
    assert files.answer("a.js", known).status_code == 304
    (tmp_path / "a.js").write_text("two")
    assert files.answer("a.js", known).body == b"two"


def test_head_and_other_methods(server: LiveServer) -> None:
    with server.client() as client:
        whole, head = client.get("/"), client.head("/")
        assert head.status_code == 200 and not head.content
        assert head.headers["content-length"] == str(len(whole.content))
        for path, allowed in (("/", "GET, HEAD"), ("/console/index.html", "GET, HEAD"), ("/console/events", "GET")):
            answer = client.post(path)
            assert answer.status_code == 405 and answer.headers["allow"] == allowed
        assert client.head("/console/events").status_code == 405


@pytest.mark.parametrize(
    "path", ["", "nope.js", "vendor", "../__init__.py", "..%2f__init__.py", "%2e%2e/tiny/config.json", ".git/config"]
)
def test_nothing_else_can_be_had(server: LiveServer, path: str) -> None:
    with server.connect() as connection:
        connection.sendall(f"GET /console/{path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 404 ")


def test_what_is_hidden_is_not_served(tmp_path: Path) -> None:
    for name in (".env", "vendor/.hidden", "vendor/a.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert ConsoleFiles(tmp_path).names == ["vendor/a.css"]


def test_the_page_needs_no_key_and_its_data_does(serve: Serve) -> None:
    server = serve(api_key=("secret",))
    assert server.get("/").status_code == server.get("/console/index.html").status_code == 200
    for path in ("/console/events", "/console/nope", "/console/"):
        assert server.get(path).status_code == 401
    with server.client() as client:
        headers = {"Authorization": "Bearer secret"}
        with client.stream("GET", "/console/events", headers=headers) as answer:
            assert answer.status_code == 200


def test_a_server_without_a_console(serve: Serve) -> None:
    server = serve(console=False)
    for path in ("/", "/console/index.html", "/console/events"):
        assert server.get(path).status_code == 404
