"""Client that records how each stream and each answer ends, and when."""

import asyncio
import json
import re
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

PATIENCE_S = 120.0
MAX_ANSWER_BYTES = 2**26  # a `max_tokens` above the context gives as many tokens as fit
_CODE = re.compile(rb'"code":\s*"(\w+)"')
_FINISH = re.compile(rb'"finish_reason":\s*"(\w+)"')
HOST = "host: localhost"


def request_bytes(body: Any, path: str = "/v1/completions", header: str = HOST) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\n{header}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def stream_body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": "def f(x):\n", "stream": True, "max_tokens": tokens, "ignore_eos": True, **more}


@dataclass(slots=True)
class Streams:
    """Concurrent streams. `ends`: how each ended; `last_s`: when the last one did."""

    count: int
    begun: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    last_s: float = 0.0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, port: int, body: dict[str, Any]) -> None:
        """Return when all have ended."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(self._stream(port, body) for _ in range(self.count)))

    async def _stream(self, port: int, body: dict[str, Any]) -> None:
        raw, begun = b"", False
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_ANSWER_BYTES)
            writer.write(request_bytes(body, header="host: localhost\r\nconnection: close"))
            while part := await reader.read(2**16):
                raw += part
                if not begun and b"data: " in raw:
                    begun = True
                    self._note_begun()
            writer.close()
        except OSError:
            pass
        if not begun:
            self._note_begun()
        self.ends[end_of(raw)] += 1
        self.last_s = time.monotonic()

    def _note_begun(self) -> None:
        self.begun += 1
        if self.begun == self.count:
            self.all_begun.set()


def end_of(raw: bytes) -> str:
    """Return how a stream ended: its finish reason if it is complete, the code of its error, or `cut`."""
    if b"data: [DONE]" in raw:
        return b",".join(sorted(set(_FINISH.findall(raw)))).decode()
    found = _CODE.search(raw)
    return found.group(1).decode() if found else "cut"


class Connection:
    """Reused connection. `post` returns the status, 0 if there was no answer."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, data: bytes, path: str = "/v1/completions", header: str = HOST) -> tuple[int, str]:
        """Return the status and the code of the error."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                if self._writer is None:
                    self._reader, self._writer = await asyncio.open_connection(
                        "127.0.0.1", self._port, limit=MAX_ANSWER_BYTES
                    )
                self._writer.write(request_bytes(data, path, header))
                return await self._answer()
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            self.close()
            return 0, ""

    async def _answer(self) -> tuple[int, str]:
        assert self._reader is not None
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" in head:
            body = await self._reader.readuntil(b"0\r\n\r\n")
        else:
            length = re.search(rb"content-length: (\d+)", head)
            body = await self._reader.readexactly(int(length.group(1)) if length else 0)
        if b"connection: close" in head:
            self.close()
        found = _CODE.search(body)
        return int(head[9:12]), found.group(1).decode() if found else ""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


def silent(port: int, data: bytes) -> socket.socket:
    """Open a client with a small receive buffer that sends `data` and then does nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(data)
    return connection
