"""A deployment is served once one of its own engines has answered at its public address."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.gpu_server import free_port
from roseinfer.core.errors import ResourceError
from roseinfer.integrations.ray.public import DEPLOYMENT_HEADER, await_answer


@contextmanager
def server(deployment: str, statuses: list[int], key: str) -> Iterator[str]:
    """Run a server with this id that gives these answers in turn, 401 without the key. Yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            known = self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(statuses.pop(0) if known else 401)
            if deployment:
                self.send_header(DEPLOYMENT_HEADER, deployment)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"words")

        def log_message(self, format: str, *values: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()


def test_the_first_answer_of_an_engine_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.integrations.ray.public.RETRY_PAUSE_S", 0.0)
    statuses = [503, 500, 200]
    with server("ours", statuses, "abc") as url:
        await_answer(url, "ours", "abc")
    assert statuses == []


@pytest.mark.parametrize(
    ("deployment", "status", "says"),
    [
        ("", 200, "another server answered with status 200"),
        ("theirs", 200, "another server answered with status 200"),
        ("ours", 503, "status 503: words"),
    ],
)
def test_other_servers_and_errors_are_no_answer(deployment: str, status: int, says: str) -> None:
    with server(deployment, [status], "abc") as url, pytest.raises(ResourceError, match=says):
        await_answer(url, "ours", "abc", timeout_s=0.0)


def test_no_server_is_no_answer() -> None:
    with pytest.raises(ResourceError, match="Connection refused"):
        await_answer(f"http://127.0.0.1:{free_port()}", "ours", None, timeout_s=0.0)
