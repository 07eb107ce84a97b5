"""Batches over HTTP: a server process and a client that streams from it."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from roseinfer.bench.load import Send
from roseinfer.processes.launch import ChildProcess, launch
from roseinfer.processes.supervise import finish

ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)")
START_TIMEOUT_S, STOP_TIMEOUT_S = 600.0, 60.0


@asynccontextmanager
async def server(model: str, options: Sequence[str]) -> AsyncIterator[str]:
    """Run `roseinfer serve MODEL options...` on a free port; yield its base URL once it is ready."""
    command = ["serve", model, "--port", "0", "--log-level", "warning", *options]
    process = launch("roseinfer.cli.terminal.child_server", arguments=command, read_stdout=True)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            address = await asyncio.to_thread(_address, process)
        yield address
    finally:
        process.stdin.close()
        await finish(process.stop(STOP_TIMEOUT_S))
        process.close()


def _address(process: ChildProcess) -> str:
    output = b""
    for line in process.stdout:
        output += line
        match = ADDRESS.search(line)
        if match:
            return match[0].decode()
    raise RuntimeError(f"the server did not start:\n{output.decode(errors='replace')}")


@asynccontextmanager
async def http_sender(base_url: str, model: str) -> AsyncIterator[Send]:
    """Yield a sender that streams /v1/completions. Needs the `bench` extra (aiohttp)."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send(name: str, prompt_ids: list[int], output_len: int) -> list[tuple[float, int]]:
            body = {
                "model": model,
                "prompt": prompt_ids,
                "max_tokens": output_len,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            headers = {"X-Request-Id": name}
            async with session.post(f"{base_url}/v1/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                return await _read(response.content)

        yield send


async def _read(lines: AsyncIterable[bytes]) -> list[tuple[float, int]]:
    """Return (time, tokens) of each chunk: one token each, the rest of the usage's count in the last chunk."""
    chunks: list[tuple[float, int]] = []
    usage = 0
    async for line in lines:
        if line.startswith(b'data: {"error"'):
            raise RuntimeError(line.decode())
        if b'"usage":{' in line:
            usage = json.loads(line[6:])["usage"]["completion_tokens"]
        elif line.startswith(b"data: {"):
            chunks.append((time.perf_counter(), 1))
    if len(chunks) != usage:
        at, _ = chunks.pop()
        chunks.append((at, usage - len(chunks)))
    return chunks
