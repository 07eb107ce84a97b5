"""`roseinfer demo`: its plan, its counts, and the whole command with an engine without a model."""

import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from roseinfer.cli.terminal.config import DemoConfig
from roseinfer.cli.terminal.demo_load import PromiseEnd, Tally
from roseinfer.cli.terminal.demo_plan import (
    BURST_COUNT,
    CYCLE_S,
    LONG_TOKENS,
    DemoKind,
    Speed,
    plan,
)
from roseinfer.core.errors import ConfigError
from tests.helpers.process_table import alive, children
from tests.server.real_server import priced, until

SPEEDS = [Speed(0.02, 0.005), Speed(2.0, 0.2), Speed(0.001, 0.0001)]


@pytest.mark.parametrize("speed", SPEEDS)
def test_every_kind_of_promise_is_made_in_each_cycle(speed):
    requests = list(plan(speed, 2 * CYCLE_S, seed=1))
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    assert all(0 <= one.at_s < 2 * CYCLE_S for one in requests)
    for began_s in (0.0, CYCLE_S):
        kinds = [one.kind for one in requests if began_s <= one.at_s < began_s + CYCLE_S]
        assert set(kinds) == set(DemoKind) and kinds.count(DemoKind.BURST) == BURST_COUNT
    assert requests == list(plan(speed, 2 * CYCLE_S, seed=1)) != list(plan(speed, 2 * CYCLE_S, seed=2))


@pytest.mark.parametrize("speed", SPEEDS)
def test_objectives_follow_the_speed_of_the_machine(speed):
    for request in plan(speed, CYCLE_S, seed=0):
        slo, idle_ms = request.body["slo"], 1000 * speed.ttft_s
        if request.kind is DemoKind.IMPOSSIBLE:
            assert slo["ttft_ms"] < idle_ms / 10
        elif request.kind is DemoKind.SURPRISE:
            said_s = speed.ttft_s + request.body["pred_output_len"] * speed.tpot_s
            assert 2 * said_s < slo["e2e_ms"] / 1000 and request.body["max_tokens"] == LONG_TOKENS
            tokens_s = LONG_TOKENS * speed.tpot_s
            assert slo["e2e_ms"] / 1000 < 4 * speed.ttft_s + tokens_s / 2
        else:
            assert slo["ttft_ms"] > 5 * idle_ms and slo["tpot_ms"] > 5000 * speed.tpot_s


def test_a_demo_may_go_on():
    assert next(islice(plan(SPEEDS[0], float("inf"), seed=0), 1000, None)).at_s > CYCLE_S


def test_counts_add_up():
    tally = Tally()
    tally.sent.update({DemoKind.EASY: 3, DemoKind.BURST: 2})
    tally.add(DemoKind.EASY, PromiseEnd.KEPT)
    tally.add(DemoKind.EASY, PromiseEnd.LATE)
    tally.add(DemoKind.BURST, PromiseEnd.REJECTED, "queue")
    assert tally.line() == "kept 1, late 1, rejected 1 (queue 1), running 2"
    assert (tally.count(PromiseEnd.KEPT, DemoKind.EASY), tally.count(PromiseEnd.KEPT, DemoKind.BURST)) == (1, 0)
    tally.add(DemoKind.BURST, PromiseEnd.FAILED)
    assert tally.line() == "kept 1, late 1, rejected 1 (queue 1), failed 1, running 1"


def test_negative_durations_are_refused():
    with pytest.raises(ConfigError, match="duration must not be negative"):
        DemoConfig(duration=-1)


def start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "roseinfer.cli", "demo", "--port", "0", *priced(folder, step_s=0.002), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def numbers(line: str) -> dict[str, int]:
    """Return the counts of a line by name."""
    return {name: int(count) for name, count in re.findall(r"(sent|kept|late|rejected|failed|running) (\d+)", line)}


def test_a_short_demo_from_start_to_end(tmp_path):
    with start(tmp_path, "--duration", "4") as process:
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert re.search(r"^console: http://127\.0\.0\.1:\d+/ ", out, re.MULTILINE) and "what to try next" in out
    kinds = {
        kind: numbers(next(line for line in out.splitlines() if line.strip().startswith(kind))) for kind in DemoKind
    }
    (total,) = (numbers(line) for line in out.splitlines() if line.strip().startswith("total: "))
    assert total["running"] == 0 and "failed" not in total
    for ending in ("kept", "late", "rejected"):
        assert total[ending] == sum(counts.get(ending, 0) for counts in kinds.values())
    assert sum(counts["sent"] for counts in kinds.values()) == total["kept"] + total["late"] + total["rejected"]
    assert kinds[DemoKind.IMPOSSIBLE]["rejected"] == kinds[DemoKind.IMPOSSIBLE]["sent"] > 0


def test_ctrl_c_ends_load_and_server(tmp_path):
    with start(tmp_path, "--duration", "0") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(re.search(r"kept \d", line) for line in lines)
        (server,) = children(process.pid)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 0 and "what to try next" in rest
        until(lambda: not alive(server))
