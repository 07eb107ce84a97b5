"""`roseinfer serve A B --api-workers 2`: real processes, of which the engine of one model dies."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.cases import cases
from tests.server.real_server import RealServer, priced, until

pytestmark = pytest.mark.long


class TwoModels(RealServer):
    """Models `a` and `b`, without weights."""

    fixed = ("tiny", "tiny", "--served-model-name", "a", "b", "--port", "0", "--max-num-seqs", "16")
    served = r"^a, b are served on http://127\.0\.0\.1:\d+; "

    def ask(self, model: str) -> httpx.Response:
        body: dict[str, Any] = {"model": model, "prompt": "x", "max_tokens": 3}
        return httpx.post(self.url + "/v1/completions", json=body, timeout=60)


@cases("workers", ["2"], exhaustive=["1"])
def test_the_death_of_an_engine_affects_its_model_only(tmp_path: Path, workers: str) -> None:
    with TwoModels("--api-workers", workers, *priced(tmp_path)) as server:
        assert [server.ask(model).json()["model"] for model in ("a", "b")] == ["a", "b"]
        assert server.ask("c").json()["error"]["code"] == "model_not_found"
        killed = server.engines()[1]  # of either model, since both are launched at once
        os.kill(killed, signal.SIGKILL)
        failed: set[str] = set()
        while server.log().count("is up again") == 0:
            failed |= {model for model in ("a", "b") if server.ask(model).status_code != 200}
            time.sleep(0.05)
        until(lambda: {server.ask(model).status_code for model in ("a", "b")} == {200})
        assert server.fresh("/ready").status_code == 200
        assert killed not in server.engines()
        engines = server.fresh("/health").json()["engines"]
        assert [(each["engine"], each["model"]) for each in engines] == [(0, "a"), (1, "b")]
        deaths = [each["restarts"] for each in engines]
        assert sorted(deaths) == [0, 1]
        assert failed <= {"ab"[deaths.index(1)]}, "requests for the other model did not notice"
        text = server.fresh("/metrics").text
        for model, engine in (("a", 0), ("b", 1)):
            assert (
                f'vllm:request_success_total{{engine="{engine}",finished_reason="length",model_name="{model}"}}' in text
            )
            assert f'roseinfer:step_time_seconds_count{{engine="{engine}",model_name="{model}"}}' in text
            assert f'roseinfer:engine_deaths_total{{engine="{engine}",model_name="{model}"}} {deaths[engine]}.0' in text
        server.process.terminate()
        assert server.exit_code() == 0
