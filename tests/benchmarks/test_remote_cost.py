"""benchmarks/remote_cost.py: what it makes of its figures."""

from benchmarks import remote_cost


def test_times_are_percentiles_and_costs_medians():
    found = remote_cost.summary({"one token ms": [float(n) for n in range(101)], "engine us a token": [3.0, 1.0, 2.0]})
    assert found == {
        "one token ms p10": 10.0,
        "one token ms p50": 50.0,
        "one token ms p90": 90.0,
        "engine us a token": 2.0,
        "least engine us a token": 1.0,
    }


def test_it_finds_the_engines_of_a_process():
    import os

    assert remote_cost.children(os.getpid()) == []
