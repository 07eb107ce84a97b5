"""An engine whose accelerator fails: every open request ends loudly, and the server says that it is not well."""

import threading
from typing import Any

import pytest

from roseinfer.core.plan import StepPlan, StepResult
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.thread_transport import ThreadTransport
from tests.helpers.engine_info import changed
from tests.helpers.engines import make_core
from tests.helpers.fake_runner import FakeRunner
from tests.server.live import PATIENCE_S, LiveServer, http_post, read_all
from tests.text.tokenizers import byte_level

BLOCKS, BLOCK_SIZE, VOCAB = 64, 16, 300


class OutOfMemoryError(RuntimeError):
    """Like torch's."""


class FailingRunner(FakeRunner):
    """Waits for the test before its sixth step; behind that it fails in `where` once three requests take part."""

    def __init__(self, where: str) -> None:
        super().__init__(BLOCKS, BLOCK_SIZE, VOCAB)
        self.gate = threading.Event()
        self._where = where

    def submit(self, plan: StepPlan) -> int:
        assert plan.step < 5 or self.gate.wait(PATIENCE_S)
        self._maybe_fail("submit", plan)
        return super().submit(plan)

    def collect(self, handle: int) -> StepResult:
        self._maybe_fail("collect", self.submitted[handle])
        return super().collect(handle)

    def _maybe_fail(self, where: str, plan: StepPlan) -> None:
        if where == self._where and len(plan.rows) == 3 and self.gate.is_set():
            raise OutOfMemoryError("CUDA out of memory at /secret/place")


class FailingServer(LiveServer):
    def __init__(self, where: str, depth: int) -> None:
        super().__init__(byte_level())
        self.runner = FailingRunner(where)
        self._depth = depth

    async def _start_engine(self) -> Any:
        core = make_core(
            num_blocks=BLOCKS, block_size=BLOCK_SIZE, runner=self.runner, vocab_size=VOCAB, depth=self._depth
        )
        info = changed(self.info, max_model_len=BLOCKS * BLOCK_SIZE, vocab_size=VOCAB)
        return await AsyncEngine.start(ThreadTransport(lambda: (core, info)), self.tokenizer)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("where", ["submit", "collect"])
def test_out_of_memory_ends_every_request_and_shows_in_health(where: str, depth: int) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True}
    with FailingServer(where, depth) as server:
        with server.connect() as begun, server.connect() as waiting, server.connect() as whole:
            begun.sendall(http_post("/v1/completions", body | {"stream": True}))
            assert begun.recv(15) == b"HTTP/1.1 200 OK"
            waiting.sendall(http_post("/v1/completions", body | {"stream": True}, "connection: close"))
            whole.sendall(http_post("/v1/completions", body, "connection: close"))
            server.until(lambda: server.engine.num_live == 3)
            server.runner.gate.set()
            answers = [read_all(connection).decode() for connection in (begun, waiting, whole)]
        for answer in answers:
            assert "[DONE]" not in answer and '"code":"engine_dead"' in answer
            assert "secret" not in answer, "that is for the log"
        assert answers[2].startswith("HTTP/1.1 500 ")
        for path in ("/health", "/ready"):
            sick = server.get(path)
            assert (sick.status_code, sick.json()["error"]["code"]) == (503, "engine_unhealthy")
        late = server.post("/v1/completions", body)
        assert (late.status_code, late.headers["x-should-retry"]) == (503, "false")
        assert server.get("/load").json() == {"server_load": 0}
