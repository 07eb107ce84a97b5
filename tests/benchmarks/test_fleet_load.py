"""benchmarks/fleet_load.py: requests of given lengths, what is sent, and what is made of answers and metrics."""

import asyncio
import json

import pytest

from benchmarks import fleet_load
from benchmarks.fleet_load import Planned, Seen
from roseinfer.core.slo import Slo
from roseinfer.priced.drawn import drawn_length, key_of
from roseinfer.sim.setups import SCORPIO_8B
from tests.bench.slo_stub import stub


@pytest.mark.parametrize("length", [1, 2, 37, 900])
def test_a_seed_for_each_length(length):
    prompt = [5, 6, 7]
    assert drawn_length(key_of(fleet_load.seed_for(prompt, length, 300.0), prompt), 300.0) == length


def test_a_length_that_nobody_draws():
    with pytest.raises(ValueError, match="no output has 90000 tokens"):
        fleet_load.seed_for([1], 90_000, 300.0)


def test_all_times_scale():
    once, twice = (fleet_load.arrivals_of(SCORPIO_8B, 5.0, 20, 0, scale=scale) for scale in (1.0, 2.0))
    for a, b in zip(once, twice, strict=True):
        assert (b.at_s, b.slo.ttft_s, b.slo.tpot_s) == pytest.approx((2 * a.at_s, 2 * a.slo.ttft_s, 2 * a.slo.tpot_s))
        assert (len(a.prompt_ids), a.output_len, a.predicted_len) == (len(b.prompt_ids), b.output_len, b.predicted_len)
    assert fleet_load.scaled(SCORPIO_8B, 2.0).machine.cost.step_s == 2 * SCORPIO_8B.machine.cost.step_s


def test_the_server_is_told_as_much_as_the_simulators_engine():
    (arrival, *_) = arrivals = fleet_load.arrivals_of(SCORPIO_8B, 5.0, 3, 0)
    load = fleet_load.planned(arrivals, 2048, 400.0)
    body = json.loads(load[0].body)
    assert body["max_tokens"] == 2048 - len(arrival.prompt_ids) and "min_tokens" not in body
    assert body["pred_output_len"] == arrival.predicted_len
    assert body["slo"] == {"ttft_ms": 1e3 * arrival.slo.ttft_s, "tpot_ms": 1e3 * arrival.slo.tpot_s}


def test_a_load_is_put_and_judged():
    load = [Planned(0.0, json.dumps({"prompt": [1], "max_tokens": 3}).encode(), Slo(60.0, 60.0)) for _ in range(3)]
    with stub() as (url, asked):
        seen = asyncio.run(fleet_load.put(url, load))
    assert len(asked) == 3 and all(each.ok and each.good for each in seen)
    assert fleet_load.summary(seen)["adherence"] == 1.0


def test_who_is_good_and_who_failed():
    def seen(**fields) -> Seen:
        return Seen(Slo(1.0, 0.1), **{"ok": True, "status": 200, "output_tokens": 11, "chunk_s": [0.5, 1.0], **fields})

    assert seen().good and not seen().failed
    assert not seen(chunk_s=[1.5, 2.0]).good, "late"
    assert not seen(chunk_s=[0.5, 2.0]).good, "slow"
    assert seen(ok=False).failed and seen(error="x").failed and not seen(error="x").good
    refused = seen(ok=False, status=429, error="x", chunk_s=[])
    assert not refused.good and not refused.failed


def test_what_the_server_counts():
    text = (
        'roseinfer:slo_requests_total{engine="0",outcome="met",slo_class="a"} 6.0\n'
        'roseinfer:slo_requests_total{engine="0",outcome="missed_ttft",slo_class="a"} 2.0\n'
        'roseinfer:slo_requests_created{outcome="met"} 1e9\n'
    )
    assert fleet_load.server_adherence(text) == 0.75
