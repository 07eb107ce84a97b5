"""A process that runs `serve` around a fake engine; test_run.py talks to it over HTTP, signals and its stdin.

Lines on stdin: `load` lets the engine come up, `fail` lets its start fail, `release` lets held requests go on.
"""

import asyncio
import os
import sys
from typing import Any

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, ModelNotFoundError
from roseinfer.integrations.otel.endpoint import with_traces
from roseinfer.server.app import ModelParts
from roseinfer.server.hosting import new_event_loop
from roseinfer.server.run import HostedModel, serve
from roseinfer.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, Wait
from tests.text.tokenizers import byte_level


async def main(port: int, shutdown_timeout: float) -> None:
    lines: dict[str, asyncio.Event] = {name: asyncio.Event() for name in ("load", "fail", "release")}
    loop = asyncio.get_running_loop()

    def on_line() -> None:
        line = sys.stdin.readline().strip()
        if line:
            lines[line].set()
        else:
            loop.remove_reader(sys.stdin.fileno())

    loop.add_reader(sys.stdin.fileno(), on_line)

    async def start_engine(tokenizer: Tokenizer) -> FakeEngine:
        waits = [asyncio.create_task(lines[name].wait()) for name in ("load", "fail")]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if lines["fail"].is_set():
            raise ModelNotFoundError("no such model")
        return Engine(tokenizer)

    class Engine(FakeEngine):
        def default_script(self, request: Any) -> list[Any]:
            first, *rest = super().default_script(request)
            return [first, Wait(), *rest]

        async def wait(self) -> None:
            await lines["release"].wait()

        async def close(self) -> None:
            print("engine closed", flush=True)

    config = with_traces(ServerConfig(port=port, shutdown_timeout=shutdown_timeout), os.environ)
    model = HostedModel(ModelParts(config, "fake"), byte_level, start_engine)
    await serve([model])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            runner.run(main(int(sys.argv[1]), float(sys.argv[2])))
        except (ConfigError, ModelNotFoundError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
