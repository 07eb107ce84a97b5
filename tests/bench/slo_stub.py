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


LOADING = (503, {"error": {"message": "The model is still loading", "type": "overloaded_error", "code": "loading"}})
WRONG_KEY = (401, {"error": {"message": "Incorrect API key", "code": "invalid_api_key"}})


class StubHandler(BaseHTTPRequestHandler):
    """Answers as the request's content demands, and records requests. `failures`: statuses and bodies of the first
    answers to requests for models.
    """

    asked: list[tuple[dict[str, Any], dict[str, str]]]
    failures: list[tuple[int, dict[str, Any]]]

    def do_GET(self) -> None:
        if self.failures:
            status, body = self.failures.pop()
            self._answer(status, json.dumps(body).encode())
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
def stub(*failures: tuple[int, dict[str, Any]]) -> Iterator[tuple[str, list[tuple[dict[str, Any], dict[str, str]]]]]:
    asked: list[tuple[dict[str, Any], dict[str, str]]] = []
    shared = {"asked": asked, "failures": list(failures)}
    with Stub(("127.0.0.1", 0), type("Handler", (StubHandler,), shared)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
