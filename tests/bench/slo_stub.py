"""Completions server that answers at once, as the request's content demands."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REFUSAL = {
    "error": {
        "message": "no",
        "type": "overloaded_error",
        "code": "slo_unattainable",
        "predicted_ttft_ms": 700,
        "cause": "seats",
    }
}


LOADING = {"error": {"message": "The model is still loading", "type": "overloaded_error", "code": "loading"}}


class StubHandler(BaseHTTPRequestHandler):
    """Answers as the request's content demands, and records requests. `loading`: one entry for each of the first
    requests for models, which it does not answer yet.
    """

    asked: list[tuple[dict[str, Any], dict[str, str]]]
    loading: list[None]

    def do_GET(self) -> None:
        if self.loading:
            self.loading.pop()
            self._answer(503, json.dumps(LOADING).encode())
        else:
            self._answer(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((body, dict(self.headers)))
        if self.path != "/v1/completions":
            self._answer(404, b'{"error": {"message": "not here"}}')
        elif self.headers.get("x-slo-ttft-ms") == "500":
            self._answer(429, json.dumps(REFUSAL).encode())
        elif body.get("kind") == "limited":
            self._answer(429, b'{"error": {"message": "slow down", "code": "rate_limit_exceeded"}}')
        else:
            tokens = body["max_tokens"] - (body.get("kind") == "cut")
            said = b'data: {"choices":[{"text":"a"}]}\n\n' * (tokens - 1)
            reason = b"null" if body.get("kind") == "broken" else b'"length"'
            said += b'data: {"choices":[{"text":"a","finish_reason":%b}]}\n\n' % reason
            usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens
            self._answer(200, said + usage + b"data: [DONE]\n\n")

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("retry-after", "1")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's standard error clean."""


class Stub(ThreadingHTTPServer):
    request_queue_size = 128


@contextmanager
def stub(loading: int = 0) -> Iterator[tuple[str, list[tuple[dict[str, Any], dict[str, str]]]]]:
    asked: list[tuple[dict[str, Any], dict[str, str]]] = []
    shared = {"asked": asked, "loading": [None] * loading}
    with Stub(("127.0.0.1", 0), type("Handler", (StubHandler,), shared)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
