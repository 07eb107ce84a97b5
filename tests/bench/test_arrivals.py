"""Requests and arrival times of an open-loop load."""

from itertools import pairwise

import pytest

from roseinfer.bench.arrivals import draw
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.core.errors import ConfigError


def lengths(**options) -> list[tuple[int, int]]:
    return [(len(planned.prompt_ids), planned.output_len) for planned in draw(OpenLoopConfig(**options))]


def test_a_burst_is_due_at_once_and_all_alike():
    planned = draw(OpenLoopConfig(num=5, in_len=7, out_len=3))
    assert [p.number for p in planned] == list(range(5)) and {p.at_s for p in planned} == {0.0}
    assert {(len(p.prompt_ids), p.output_len) for p in planned} == {(7, 3)}
    assert len({tuple(p.prompt_ids) for p in planned}) == 5


def test_ranges_are_reached_and_kept():
    drawn = lengths(num=400, in_min=2, in_len=5, out_min=1, out_len=3)
    assert {n for n, _ in drawn} == {2, 3, 4, 5} and {n for _, n in drawn} == {1, 2, 3}


def test_cycle():
    assert [n for n, _ in lengths(num=6, cycle="4,1")] == [4, 1] * 3


def test_prompts():
    shared = draw(OpenLoopConfig(num=2, in_len=6, shared_prefix=4, vocab=20))
    first, second = (p.prompt_ids for p in shared)
    assert first[:4] == second[:4] and first != second
    assert all(10 <= id < 20 for id in first[4:])
    only_shared = draw(OpenLoopConfig(num=1, in_len=3, shared_prefix=3))
    assert len(only_shared[0].prompt_ids) == 4
    same = draw(OpenLoopConfig(num=3, in_len=6, same_prompt=True))
    assert len({tuple(p.prompt_ids) for p in same}) == 1


def test_evenly_spaced():
    assert [p.at_s for p in draw(OpenLoopConfig(num=3, workload="uniform", rate=4))] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(("options", "spread"), [({}, 1.0), ({"burstiness": 4.0}, 0.5), ({"burstiness": 0.25}, 2.0)])
def test_random_gaps_have_the_mean_and_spread_they_should(options, spread):
    """Check that the gaps' standard deviation over their mean is 1 for Poisson and 1 / sqrt(shape) for gamma."""
    workload = "gamma" if options else "poisson"
    times = [0.0] + [p.at_s for p in draw(OpenLoopConfig(num=4000, workload=workload, rate=8, in_len=1, **options))]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 8, rel=0.1) and deviation / mean == pytest.approx(spread, rel=0.1)


def test_the_same_options_draw_the_same_and_others_other_prompts():
    def prompts(**options):
        return [p.prompt_ids for p in draw(OpenLoopConfig(num=2, **options))]

    assert prompts() == prompts() == prompts(procs=2, label="x")
    others = [prompts(seed=1), prompts(out_len=33), prompts(workload="uniform"), prompts(workload="uniform", rate=2)]
    assert len({repr(other) for other in [prompts(), *others]}) == 5


def test_draws_stay_what_they_were():
    """Check fixed draws, so that figures measured earlier stay comparable."""
    nano = draw(OpenLoopConfig(num=256, in_min=100, in_len=1024, out_min=100, out_len=1024, procs=8))
    assert nano[0].prompt_ids[:4] == [10060, 4385, 22721, 6549]
    assert (len(nano[0].prompt_ids), nano[0].output_len) == (542, 113)
    poisson = draw(OpenLoopConfig(num=400, workload="poisson", rate=20, in_len=512, out_len=128))
    assert poisson[0].prompt_ids[:4] == [29863, 29817, 5621, 1425] and round(poisson[0].at_s, 4) == 0.0399


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num": 0}, "num"),
        ({"rate": 0.0}, "rate"),
        ({"procs": 0}, "procs"),
        ({"in_len": 4, "in_min": 5}, "in_min"),
        ({"out_min": -1}, "out_min"),
        ({"cycle": "1,x"}, "cycle"),
        ({"vocab": 10}, "vocab"),
        ({"workload": "all"}, "workload"),
    ],
)
def test_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        OpenLoopConfig(**options)
