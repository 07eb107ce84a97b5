"""Count the files, functions and function lines of roseinfer that one chat request runs.

    python -m benchmarks.request_files [--functions] [--files]

The real application runs in uvicorn on a real socket, the real engine in a thread of the same process, so that one
profiler sees both, and the embedded model on the CPU. Counted is what runs in any thread while one streamed chat
request with a latency objective is answered; imports and the start do not count. Prints a line for each package, then
`total files N functions M lines L`. A function is a code object: a comprehension or a lambda is one more. Lines are
those of all these functions, without docstrings and comments (`benchmarks.code_size.function_lines`).
"""

import argparse
import asyncio
import json
import logging
import socket
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import roseinfer
from benchmarks.code_size import function_lines, package_of
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.engine.start import start_engine
from roseinfer.server.app import ModelParts, parts_of
from roseinfer.server.asgi import Server, uvicorn_config
from roseinfer.server.hosting import listen, new_event_loop

PACKAGE = Path(roseinfer.__file__).parent
PREFIX = f"{PACKAGE}/"
TIMEOUT_S = 120.0
# Time for processes that the server starts in the background, such as the one that checks grammars.
BACKGROUND_START_S = 1.0


class Profile:
    """Code objects that ran while `on` was set, in threads that were started after `install`."""

    def __init__(self) -> None:
        self.on = False
        self._codes: set[CodeType] = set()

    def install(self) -> None:
        threading.setprofile(self._add)

    def _add(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call":
            self._codes.add(frame.f_code)

    def functions(self) -> dict[str, set[str]]:
        """Return "first line:qualified name" of the functions by file, as its path in the package."""
        found: dict[str, set[str]] = defaultdict(set)
        for code in self._codes:
            if code.co_filename.startswith(PREFIX) and code.co_name != "<module>":
                path = code.co_filename.removeprefix(PREFIX)
                found[path].add(f"{code.co_firstlineno}:{code.co_qualname}")
        return found


class HostedServer:
    """Server and engine in a thread, on a free port of the loopback."""

    def __init__(self) -> None:
        config = ServerConfig(port=0)
        self._parts = parts_of([ModelParts(config, "tiny")])
        self._listener = listen(config)
        self.port: int = self._listener.getsockname()[1]
        self._up = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._server: Server
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._failure = error
        self._up.set()

    async def _main(self) -> None:
        model = ModelConfig(device="cpu")
        config = EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=256), scheduler=SchedulerConfig())
        tokenizer = load_tokenizer(model)
        engine = await start_engine(config, tokenizer, in_process=True)
        self._server = Server(uvicorn_config(self._parts))
        serving = asyncio.create_task(self._server.serve([self._listener]))
        await self._parts.service.load_texts(tokenizer)  # as `serve` does
        self._parts.service.attach(engine, tokenizer)
        self._parts.service.warm_up()
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._up.set()
        await serving
        await engine.close()

    def __enter__(self) -> "HostedServer":
        self._thread.start()
        if not self._up.wait(TIMEOUT_S) or self._failure is not None:
            raise SystemExit(f"the server did not start: {self._failure!r}")
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def ask(port: int, text: str) -> str:
    """Return the events of one streamed chat answer. The client uses sockets only, so that nothing of it counts."""
    messages = [{"role": "user", "content": text}]
    fields = {"messages": messages, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields | {"slo": {"ttft_ms": 5000, "tpot_ms": 500}}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts).decode()


def measure() -> dict[str, set[str]]:
    """Return the functions that one request runs. Raise SystemExit if its answer is not complete."""
    profile = Profile()
    profile.install()
    with HostedServer() as hosted:
        time.sleep(BACKGROUND_START_S)
        profile.on = True
        answer = ask(hosted.port, "class Stack:\n    def push(self, item):")
        profile.on = False
    if not answer.startswith("HTTP/1.1 200") or answer.count('"content"') < 6 or "data: [DONE]" not in answer:
        raise SystemExit(f"the answer is not complete:\n{answer}")
    return profile.functions()


def show(found: dict[str, set[str]], functions: bool, files: bool) -> None:
    packages: dict[str, list[str]] = defaultdict(list)
    for path in sorted(found):
        packages[package_of(path)].append(path)
    lines = function_lines(PACKAGE, found)
    for package, paths in packages.items():
        count = sum(len(found[path]) for path in paths)
        print(f"{package:<12} files {len(paths):>3} functions {count:>4} lines {lines[package]:>5}")
        for path in paths if files or functions else ():
            print(f"    {path:<44} {len(found[path]):>3}")
            for name in sorted(found[path], key=lambda name: int(name.split(":")[0])) if functions else ():
                print(f"        {name}")
    functions_run = sum(map(len, found.values()))
    print(f"total files {len(found)} functions {functions_run} lines {sum(lines.values())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the files")
    parser.add_argument("--functions", action="store_true", help="list files and functions")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    show(measure(), args.functions, args.files)


if __name__ == "__main__":
    main()
