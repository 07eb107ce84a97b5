"""`roseinfer serve --replicas 2 --record FILE`: replays have the same plans and placements; restarts need no file."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roseinfer.sim.parity import fleet_parity_of
from tests.server.real_server import RealServer, until

COST = {"cost": {"step_s": 0.005, "token_s": 1e-4, "pair_s": 0.0, "row_s": 1e-4, "context_s": 0.0}}
REQUESTS = 30


def test_a_served_run_of_two_engines_replays(tmp_path: Path) -> None:
    cost, run = tmp_path / "cost.json", tmp_path / "run"
    cost.write_text(json.dumps(COST))
    with RealServer("--replicas", "2", "--device", "priced", "--cost", str(cost), "--record", str(run)) as server:
        with server.client() as client, ThreadPoolExecutor(6) as pool:

            def ask(number: int) -> int:
                prompt = [10 + number % 3] * (150 + number)  # several KV blocks shared with other requests
                slo = {"slo": {"ttft_ms": 50_000, "tpot_ms": 5000}} if number % 3 else {}
                done = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, extra_body=slo)
                return len(done.choices)

            assert sum(pool.map(ask, range(REQUESTS))) == REQUESTS
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
    parity = fleet_parity_of(str(run))
    assert sum(engine.requests for engine in parity.engines.values()) == REQUESTS
    assert parity.plans_agree and parity.placements_agree and parity.promises_agree and parity.promises
    assert [len(router.recorded) for router in parity.routers] == [REQUESTS]


def test_engines_and_workers_restart_without_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    cost, folder = tmp_path / "cost.json", tmp_path / "folder"
    cost.write_text(json.dumps(COST))
    folder.mkdir()
    engines = ("--replicas", "2", "--device", "priced", "--cost", str(cost), "--record", str(folder / "run"))
    with RealServer(*engines, "--api-workers", "2") as server:
        folder.rename(tmp_path / "moved")
        os.kill(server.engine, signal.SIGKILL)
        os.kill(server.workers()[0], signal.SIGKILL)
        until(lambda: "engine 0 is up again" in server.log() and "API worker 0 takes requests" in server.log())
        for name in ("run.0.2", "run.router.3"):
            missing = f"cannot write '{folder / name}': No such file or directory"
            assert f"record: {missing}; the process restarts without a recording" in server.log()
        for _ in range(4):  # both workers
            asked = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
            assert server.client().completions.create(**asked).usage.total_tokens > 3
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
