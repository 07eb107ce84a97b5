"""benchmarks/routed_*.py: what they make of answers."""

import asyncio
import json

import pytest

from benchmarks import routed_burst, routed_faults, routed_overhead, routed_priced
from benchmarks.fleet_load import Seen
from roseinfer.core.slo import Slo
from tests.bench.slo_stub import stub


def seen(due_s: float, *, good: bool = True, text: str = "a", ok: bool = True) -> Seen:
    return Seen(
        Slo(1.0), due_s=due_s, ok=ok, status=200, output_tokens=2, text=text, chunk_s=[0.5 if good else 1.5, 2.0]
    )


def test_how_long_it_takes_until_a_fleet_is_back():
    bad = {23, 24, 25, 31, 32}
    run = [seen(float(at), good=at not in bad) for at in range(60)]
    assert routed_faults.back_s(run, 20.0, 0.9) == 19.0, "the last window that kept less: 30 to 39"
    assert routed_faults.back_s(run, 20.0, 0.75) == 9.0
    assert routed_faults.back_s(run, 40.0, 0.9) == 0.0


def test_texts_are_compared_where_both_runs_have_all():
    base = [seen(0.0), seen(0.0), seen(0.0, ok=False)]
    assert routed_faults.same_texts([seen(0.0), seen(0.0, text="b"), seen(0.0, text="b")], base) == 1


def test_unknown_cases():
    with pytest.raises(SystemExit):
        routed_faults.parse(["--cases", "none,flood"])


def test_a_burst_is_sent_and_counted():
    messages = routed_burst.requests(5, 0)
    assert len(set(messages)) == 5
    with stub() as (url, asked):
        _, answers = asyncio.run(routed_burst.burst(int(url.rpartition(":")[2]), messages, 0.0))
    assert answers.total() == 5 and all(" 200 " in line for line in answers)
    assert len(asked) == 5


def test_no_two_requests_of_an_overhead_begin_alike():
    prompts = {
        tuple(json.loads(routed_overhead.request(number, 1).body)["prompt"][:2]) for number in range(0, 8000, 20)
    }
    assert len(prompts) == 400


def test_a_case_for_each_router_load_and_seed():
    args = routed_priced.parse(["--rates", "7,9", "--seeds", "2", "--slow", "1,1,1,2"])
    cases = routed_priced.cases(args)
    assert len(cases) == len(set(cases)) == 2 * 2 * 2 * 2
    assert {case.load for case in cases} == {"7/s", "9/s", "7/s slow 1,1,1,2", "9/s slow 1,1,1,2"}


def test_gains_are_points_over_the_same_load():
    def line(load: str, router: str, http: float, simulated: float) -> dict:
        return {"load": load, "router": router, "HTTP": http, "server": http, "simulated": simulated}

    lines = [line("7/s", "pace", 0.95, 0.96), line("7/s", "least", 0.90, 0.92), line("9/s", "pace", 0.5, 0.5)]
    (gain,) = routed_priced.gains(lines)
    assert (gain["HTTP"], gain["simulated"], gain["apart"]) == pytest.approx((5.0, 4.0, 1.0))


def test_the_simulator_gets_the_case_that_the_server_gets():
    args = routed_priced.parse(["--replicas", "2", "--rates", "6", "--slow", "1,3", "--requests", "12"])
    even, slow = (routed_priced.simulated(case) for case in routed_priced.cases(args)[::2])
    assert 0 <= slow["adherence"] <= even["adherence"] <= 1
