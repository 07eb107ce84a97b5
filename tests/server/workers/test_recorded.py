"""`roseinfer serve --replicas 2 --record FILE`: the record replays with the same plans and placements."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from roseinfer.sim.parity import fleet_parity_of
from tests.server.real_server import RealServer

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
