"""`roseinfer serve` as an operator runs it: the command, its engine process, and what can be seen of both."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.helpers.process_table import alive, children, command_line

PATIENCE_S = 60.0
# Engines without a model keep neither.
SERVED = r"^\S+ is served on https?://127\.0\.0\.1:\d+;( weights in float32, K/V in float32;)? "
# The openai package speaks through httpx, or httpx2 since its version 3.
_SPEAKS_THROUGH = next(kind for kind in openai.DefaultHttpxClient.__mro__ if not kind.__module__.startswith("openai"))
HTTP_ERROR: type[Exception] = import_module(_SPEAKS_THROUGH.__module__.partition(".")[0]).HTTPError
OPTIONS = ("--port", "0", "--api-workers", "1", "--num-kv-blocks", "80", "--max-num-seqs", "16")
NO_COST = {"step_s": 0.0, "token_s": 1e-5, "pair_s": 0.0, "row_s": 1e-5, "context_s": 0.0}
IDLE = {"vllm:num_requests_running": 0.0, "vllm:num_requests_waiting": 0.0, "vllm:kv_cache_usage_perc": 0.0}


def priced(folder: Path, step_s: float = 0.01) -> tuple[str, ...]:
    """Options for engines without a model, which are up at once; a step takes them `step_s`."""
    cost = folder / "cost.json"
    cost.write_text(json.dumps({"cost": {**NO_COST, "step_s": step_s}}))
    return ("--device", "priced", "--cost", str(cost))


class RealServer:
    """Use as a context manager: up on entry, and gone on exit, whatever a test did to it. Leads its own group.
    `fixed`: the options that each has. `served`: pattern of the startup message.
    """

    fixed: tuple[str, ...] = OPTIONS
    served = SERVED

    def __init__(self, *options: str, verify: Any = True) -> None:
        self._verify = verify  # of httpx: how it checks the server's certificate
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close
        self._temporary = tempfile.TemporaryDirectory()  # a short path: names of sockets may not be long
        threads = () if {"priced", "--engines"} & {*options} else ("--threads", "1")  # which take none
        command = [sys.executable, "-m", "roseinfer.cli", "serve", *self.fixed, *threads, *options]
        environment = {**os.environ, "TMPDIR": self._temporary.name}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
            env=environment,
        )
        self.url = ""
        self.engine = 0

    def __enter__(self) -> "RealServer":
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise
        return self

    def _await_start(self) -> None:
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline() + self.process.stdout.readline()
        assert re.search(self.served, greeting), self.log()
        self.url = greeting.split(" served on ")[1].split(";")[0]
        self.engine = next(iter(self.engines()), 0)  # 0: it has none of its own
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=self._verify)

    def engines(self) -> list[int]:
        """In the order in which they were started."""
        return sorted(self._children_running("roseinfer.engine.process"))

    def workers(self) -> list[int]:
        """The processes that answer requests, if there are several."""
        return self._children_running("roseinfer.server.workers.worker")

    def _children_running(self, module: str) -> list[int]:
        return [child for child in children(self.process.pid) if f"-m {module}" in command_line(child)]

    def hold_successor(self) -> int:
        """Stop the engine that replaces a killed one before it is up, and return its process."""
        until(lambda: bool(set(self.engines()) - {self.engine}), longest_pause_s=0.01)  # it is up soon
        (successor,) = set(self.engines()) - {self.engine}
        os.kill(successor, signal.SIGSTOP)
        return successor

    def fresh(self, path: str) -> httpx.Response:
        """The answer on a connection of its own: of several workers, now this one answers, now that."""
        return httpx.get(self.url + path, timeout=PATIENCE_S)

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        started = children(self.process.pid) if self.process.poll() is None else [self.engine]
        try:
            self.process.communicate(timeout=PATIENCE_S)
        finally:
            for pid in started:
                if pid and alive(pid):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            self._log.close()
            self._temporary.cleanup()

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def left_behind(self) -> list[str]:
        """Return the temporary files of the server and its engine."""
        return os.listdir(self._temporary.name)

    def log(self) -> str:
        # Not by `seek`: the server, which writes at the same position, would overwrite its log.
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options(options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options(options))

    def _client_options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE_S} | given

    def status(self, path: str) -> tuple[int, str | None]:
        """(status, code of the error)."""
        answer = self.http.get(path)
        return answer.status_code, None if answer.is_success else answer.json()["error"]["code"]

    def metrics(self, *names: str, **labels: str) -> list[float]:
        """For each name the sum of the samples that have these labels."""
        sums = dict.fromkeys(names, 0.0)
        for line in self.http.get("/metrics").text.splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in sums and all(f'{key}="{value}"' in line for key, value in labels.items()):
                sums[name] += float(line.rsplit(" ", 1)[1])
        return list(sums.values())

    def until_idle(self) -> None:
        """Wait until the server and the engine have no request and no KV block is in use."""
        until(lambda: self.http.get("/load").json()["server_load"] == 0)
        until(lambda: self.metrics(*IDLE) == list(IDLE.values()))


def until(condition: Callable[[], bool], longest_pause_s: float = 0.2) -> None:
    """Wait until a condition is true. Rarer and rarer looks leave the cores to the processes that it waits for."""
    deadline, pause_s = time.monotonic() + PATIENCE_S, 0.01
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(pause_s)
        pause_s = min(longest_pause_s, 1.5 * pause_s)
