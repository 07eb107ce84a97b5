"""Server of two engines with the metrics of served and rejected requests and of a restarted engine."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families

from roseinfer.core.outputs import DraftStats, SchedulerStats
from tests.server.live import LiveServer
from tests.server.real_server import RealServer, until
from tests.text.tokenizers import byte_level

COST = {"cost": {"step_s": 0.005, "token_s": 1e-5, "pair_s": 0.0, "row_s": 1e-5, "context_s": 0.0}}
OBJECTIVES = {"slo": {"ttft_ms": 20_000, "tpot_ms": 2_000, "e2e_ms": 60_000}, "ignore_eos": True}
WHILE_RUNNING = "roseinfer:slo_step_budget_seconds"


class MetricsServer(RealServer):
    """Requests run from the entry to the exit, so that metrics of running requests exist at any time."""

    def __init__(self, folder: Path) -> None:
        cost = folder / "cost.json"
        cost.write_text(json.dumps(COST))
        super().__init__("--device", "priced", "--cost", str(cost), "--replicas", "2", "--kv-offloading-size", "0.1")
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._run_load)

    def __enter__(self) -> "MetricsServer":
        super().__enter__()
        try:
            self._load.start()
            with self.client() as client:
                self._cause_rejection(client)
                self._kill_engine(client)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._load.join()
        super().__exit__(*exc)

    def _run_load(self) -> None:
        with self.client() as client:
            while not self._stop.is_set():
                client.completions.create(**request(180))

    def _cause_rejection(self, client: openai.OpenAI) -> None:
        impossible = {"slo": {"ttft_ms": 0.001}}
        try:
            client.completions.create(**request(2, impossible))
        except openai.RateLimitError:
            return
        raise AssertionError("the request was not rejected")

    def _kill_engine(self, client: openai.OpenAI) -> None:
        """Kill an engine during streams, which continue on the other engine; wait for its restart."""
        streams = [client.completions.create(**request(60), stream=True) for _ in range(4)]
        begun = [next(stream) for stream in streams]
        os.kill(self.engine, signal.SIGKILL)
        assert all(list(stream) for stream in streams) and len(begun) == 4
        until(lambda: [engine["state"] for engine in self.fresh("/health").json()["engines"]] == ["ready"] * 2)

    def scraped(self) -> dict[str, set[str]]:
        """Return the labels by series name while a request runs. Metrics without series have no labels."""
        while WHILE_RUNNING not in (text := self.http.get("/metrics").text):
            time.sleep(0.02)
        return labels_of(text)


def labels_of(text: str) -> dict[str, set[str]]:
    """Return the labels by series name of Prometheus text."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def speculating() -> dict[str, set[str]]:
    """Return the same of an engine that verifies drafts, which a priced one does not."""
    with LiveServer(byte_level()) as server:
        server.engine.snapshot = SchedulerStats(drafts=(DraftStats("ngram", 1, (1,), (1,)),))
        return labels_of(server.get("/metrics").text)


def request(tokens: int, more: dict[str, Any] = OBJECTIVES) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "def f(x):\n", "max_tokens": tokens, "extra_body": more}
