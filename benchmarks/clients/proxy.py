"""Proxy on loopback that logs requests and answers, and keeps the answers of random weights short.

A model with random weights ends nothing and calls nothing by itself. So the proxy adds to each request what ends its
answer after a few words. A user's text that says "call the tool NAME" is answered with a call of that tool. In chats, a
text that ends with "answer exactly this:" and an answer gets that answer.
"""

import http.client
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.clients.model import CALL_START, END
from benchmarks.clients.wire import Json, Usage, api_of, events, failure

ANSWER_TOKENS = 4
ANSWER_WORD = "Ġreturn"  # byte-level vocabularies write a space like this
TIMEOUT_S = 300.0
POLL_S = 0.02
EXACT = re.compile(r"answer exactly this:\n(.*)\Z", re.IGNORECASE | re.DOTALL)
FORCED = re.compile(r"call the tool (\w+)", re.IGNORECASE)
_HOP_HEADERS = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive"}


@dataclass(slots=True)
class Exchange:
    """One request and its answer. `sent`: the client's original body, None if it is not JSON."""

    method: str
    path: str
    sent: Json | None
    status: int = 0
    answer: str = ""
    usage: Usage | None = None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def is_answer(self) -> bool:
        return api_of(self.path) is not None and self.sent is not None

    @property
    def is_good(self) -> bool:
        return self.status < 400 and not self.errors

    @property
    def is_continuation(self) -> bool:
        """True if the request contains a tool's result."""
        return self.is_answer and api_of(self.path).turn(self.sent) is None

    def close(self) -> None:
        """Extract usage and errors from the answer."""
        api = api_of(self.path)
        read = list(events(self.answer))
        for event in read:
            message = failure(event)
            if message:
                self.errors.append(message)
            self.warnings += (event.get("response") or event.get("message") or event).get("warnings") or []
            self.usage = (api and api.usage(event)) or self.usage
        if self.status >= 400 and not read:
            self.errors.append(f"{self.status} {self.answer[:200]}")


class Shortener:
    """Additions to a request that make its answer end or call a tool.

    folder: the model's. arguments: schemas by tool that replace the client's, for tools whose arguments must not be
    random.
    """

    def __init__(self, folder: Path) -> None:
        self.arguments: Mapping[str, Json] = {}
        vocab = json.loads((folder / "tokenizer.json").read_text())
        ids = dict(vocab["model"]["vocab"]) | {token["content"]: token["id"] for token in vocab["added_tokens"]}
        self._free = {str(ids[END]): 100.0, str(ids[ANSWER_WORD]): 50.0, str(ids[CALL_START]): -100.0}
        closing = [END, '"', "}", "]", '"}', '"]', '"}}']
        self._constrained = {str(ids[token]): 100.0 for token in closing if token in ids}

    def rewrite(self, api: Any, body: Json) -> None:
        if "temperature" not in body:
            body["temperature"] = 0.0
        for name, tool in api.tools(body):
            if name in self.arguments:
                tool[api.schema] = self.arguments[name]
        asked = FORCED.search(api.turn(body) or "")
        offered = {name for name, _ in api.tools(body)}
        if asked and asked[1] in offered and not api.constrained(body):
            api.force(body, asked[1])
        exact = EXACT.search(api.turn(body) or "")
        if exact:
            body["structured_outputs"] = {"choice": [exact[1]]}
        elif api.constrained(body):
            body["logit_bias"] = self._constrained
        else:
            body["logit_bias"], body["min_tokens"] = self._free, ANSWER_TOKENS


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore clients that are gone."""


class Proxy:
    """Context manager of the running proxy. `exchanges`: all so far, in order of arrival."""

    def __init__(self, upstream: str, shortener: Shortener) -> None:
        self.exchanges: list[Exchange] = []
        self._host = urlsplit(upstream).netloc
        self._shortener = shortener
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def _handle(self) -> None:
                outer._handle(self)

            do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = _handle

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, args=(POLL_S,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def ask(self, path: str, body: Json) -> Exchange:
        """Send a request of our own, which is not recorded."""
        exchange = Exchange("POST", path, body)
        shortened = json.loads(json.dumps(body))
        self._shortener.rewrite(api_of(path), shortened)
        upstream = http.client.HTTPConnection(self._host, timeout=TIMEOUT_S)
        try:
            upstream.request("POST", path, json.dumps(shortened), {"Content-Type": "application/json"})
            response = upstream.getresponse()
            exchange.status, exchange.answer = response.status, response.read().decode()
        finally:
            upstream.close()
        exchange.close()
        return exchange

    def _handle(self, client: BaseHTTPRequestHandler) -> None:
        data = client.rfile.read(int(client.headers.get("Content-Length") or 0))
        exchange = Exchange(client.command, client.path, _json(data))
        self.exchanges.append(exchange)
        api = api_of(client.path)
        if api is not None and exchange.sent is not None:
            body = json.loads(data)
            self._shortener.rewrite(api, body)
            data = json.dumps(body).encode()
        headers = {name: value for name, value in client.headers.items() if name.lower() not in _HOP_HEADERS}
        upstream = http.client.HTTPConnection(self._host, timeout=TIMEOUT_S)
        try:
            upstream.request(client.command, client.path, data or None, headers)
            self._pass_on(upstream.getresponse(), client, exchange)
        except OSError as error:
            exchange.errors.append(repr(error))
            client.close_connection = True
        finally:
            upstream.close()
            exchange.close()

    def _pass_on(self, response: http.client.HTTPResponse, client: BaseHTTPRequestHandler, exchange: Exchange) -> None:
        exchange.status = response.status
        client.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _HOP_HEADERS:
                client.send_header(name, value)
        if client.command == "HEAD":
            client.send_header("Content-Length", "0")
            client.end_headers()
            return
        client.send_header("Transfer-Encoding", "chunked")
        client.end_headers()
        parts: list[bytes] = []
        while part := response.read1(65536):
            parts.append(part)
            client.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            client.wfile.flush()
        client.wfile.write(b"0\r\n\r\n")
        exchange.answer = b"".join(parts).decode(errors="replace")


def _json(data: bytes) -> Json | None:
    try:
        body = json.loads(data)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None
