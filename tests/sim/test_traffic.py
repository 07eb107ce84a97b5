"""Laws, processes, hints and classes: what requests are made from."""

import random
import statistics
from collections import Counter

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.sim.distributions import (
    Bimodal,
    Empirical,
    Fixed,
    Gamma,
    LogNormal,
    OnOff,
    Pareto,
    Replayed,
    Steps,
    Uniform,
)
from roseinfer.sim.length_hints import ExactHints, MisleadingHints, NoisyHints, ScaledHints, ShuffledHints
from roseinfer.sim.workload import SharedPrefixes, TrafficClass, Workload

SHORT = TrafficClass("short", Fixed(10), Uniform(1, 100), Slo(1.0, 0.05, class_name="short"), share=3)
LONG = TrafficClass("long", Fixed(1000), Fixed(50), Slo(e2e_s=10.0, class_name="long"), tenant="b", priority=2)


def drawn(law, count: int = 4000) -> list[int]:
    rng = random.Random(0)
    return [law.draw(rng) for _ in range(count)]


def test_laws_have_their_shape_and_keep_their_bounds() -> None:
    assert set(drawn(Fixed(7))) == {7}
    assert (min(drawn(Uniform(3, 9))), max(drawn(Uniform(3, 9)))) == (3, 9)
    normal = drawn(LogNormal(70, 1.35, low=4, high=1024))
    assert min(normal) >= 4 and max(normal) <= 1024
    assert statistics.median(drawn(LogNormal(70, 1.35))) == pytest.approx(70, rel=0.1)
    pareto = drawn(Pareto(64, 1.2, high=16384))
    assert min(pareto) == 64 and max(pareto) <= 16384
    assert sum(length > 640 for length in pareto) / 4000 == pytest.approx(0.1**1.2, rel=0.3)
    modes = drawn(Bimodal((8, 40), (500, 1000), 0.3))
    assert all(8 <= length <= 40 or 500 <= length <= 1000 for length in modes)
    assert sum(length >= 500 for length in modes) / 4000 == pytest.approx(0.3, abs=0.03)
    assert set(drawn(Empirical([5, 6]))) == {5, 6}


@pytest.mark.parametrize("process", [Gamma(), Gamma(2.0), OnOff(3.0, 7.0), Steps((0.5, 2.0, 0.5)), Steps((1, 3))])
def test_processes_keep_the_mean_rate_and_the_order(process) -> None:
    times = process.times(20.0, 20_000, random.Random(0))
    assert len(times) == 20_000 and times == sorted(times)
    assert 20_000 / times[-1] == pytest.approx(20.0, rel=0.05)


def test_nobody_arrives_while_off() -> None:
    times = OnOff(3.0, 7.0).times(5.0, 2000, random.Random(0))
    assert all(at_s % 10.0 <= 3.0 for at_s in times)
    assert 2000 / times[-1] == pytest.approx(5.0, rel=0.1)


def test_steps_have_their_factors() -> None:
    times = Steps((0.5, 2.0, 0.5)).times(10.0, 6000, random.Random(0))
    parts = [sum(200.0 * i <= at_s < 200.0 * (i + 1) for at_s in times) / 200.0 for i in range(3)]
    assert parts[0] == pytest.approx(5.0, rel=0.1)
    assert parts[1] == pytest.approx(20.0, rel=0.1)


def test_replayed_times_keep_their_pattern() -> None:
    times = Replayed([0.0, 1.0, 1.5, 5.0]).times(2.0, 4, random.Random(0))
    assert times == pytest.approx([0.0, 0.4, 0.6, 2.0])
    with pytest.raises(ConfigError, match="5 arrivals are needed"):
        Replayed([0.0, 1.0]).times(2.0, 5, random.Random(0))
    with pytest.raises(ConfigError, match="are at one time"):
        Replayed([1.0, 1.0]).times(2.0, 2, random.Random(0))


def test_classes_come_in_their_shares_with_what_they_are() -> None:
    arrivals = Workload([SHORT, LONG], rate=10.0).requests(4000, 0)
    assert len(arrivals) == 4000
    assert arrivals == Workload([SHORT, LONG], rate=10.0).requests(4000, 0) != Workload([SHORT], 10.0).requests(4000, 0)
    long = [arrival for arrival in arrivals if arrival.slo == LONG.slo]
    assert len(long) / 4000 == pytest.approx(0.25, abs=0.03)
    assert {(len(a.prompt_ids), a.output_len, a.tenant, a.priority) for a in long} == {(1000, 50, "b", 2)}
    assert all(len(a.prompt_ids) == 10 for a in arrivals if a.slo == SHORT.slo)


def test_a_class_may_have_arrivals_of_its_own() -> None:
    own = TrafficClass("own", Fixed(5), Fixed(5), share=1, process=OnOff(1.0, 9.0))
    arrivals = Workload([SHORT, own], rate=8.0).requests(4000, 0)
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    bursts = [a.at_s for a in arrivals if a.slo is None]
    assert len(bursts) == 1000 and all(at_s % 10.0 <= 1.0 for at_s in bursts)


def test_too_long_requests_are_drawn_again_and_rate_0_is_all_at_once() -> None:
    arrivals = Workload([SHORT], rate=0.0, context=60).requests(500, 0)
    assert {arrival.at_s for arrival in arrivals} == {0.0}
    assert max(arrival.output_len for arrival in arrivals) == 50


def test_prompts_of_a_class_may_begin_alike() -> None:
    alike = TrafficClass("alike", Uniform(5, 50), Fixed(1), prefixes=SharedPrefixes(20))
    arrivals = Workload([alike], rate=1.0, distinct=True).requests(50, 0)
    long = [list(a.prompt_ids) for a in arrivals if len(a.prompt_ids) > 30]
    assert len({tuple(ids[:20]) for ids in long}) == 1
    assert len({tuple(ids[20:]) for ids in long}) == len(long)


def test_some_prompts_share_one_of_several_beginnings() -> None:
    some = TrafficClass("some", Fixed(200), Fixed(1), prefixes=SharedPrefixes(100, share=0.6, number=3))
    arrivals = Workload([some], rate=1.0, distinct=True).requests(1000, 0)
    heads = Counter(tuple(a.prompt_ids[:100]) for a in arrivals)
    shared = [count for count in heads.values() if count > 1]
    assert len(shared) == 3 and sum(shared) == pytest.approx(600, rel=0.1)
    assert min(shared) > 150 and len({tuple(a.prompt_ids) for a in arrivals}) == 1000


def test_texts_in_front_of_prompts_come_from_a_pool_and_some_are_frequent() -> None:
    prefixes = SharedPrefixes(32, number=50, zipf=1.0, in_front=True, pool="system")
    classes = [TrafficClass(name, Uniform(5, 9), Fixed(1), prefixes=prefixes) for name in "ab"]
    arrivals = Workload(classes, rate=1.0, context=42, distinct=True).requests(2000, 0)
    assert {len(a.prompt_ids) for a in arrivals} == {37, 38, 39, 40, 41}
    counts = sorted(Counter(tuple(a.prompt_ids[:32]) for a in arrivals).values(), reverse=True)
    assert len(counts) == 50, "both classes have the same texts"
    assert counts[0] == pytest.approx(2000 / 4.5, rel=0.15), "the sum of 1 / k up to 50"
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.6)
    alike = Workload(classes, rate=1.0, context=42).requests(20, 0)
    assert {len(a.prompt_ids) for a in alike} <= {37, 38, 39, 40, 41}


def test_requests_that_never_fit_are_an_error() -> None:
    with pytest.raises(ConfigError, match="class long: hardly any request fits into the context of 100 tokens"):
        Workload([TrafficClass("long", Fixed(200), Fixed(1))], rate=1.0, context=100).requests(1, 0)


def told(hints) -> list[tuple[int, int, bool, str]]:
    arrivals = Workload([SHORT], rate=1.0, hints=hints).requests(2000, 0)
    return [(a.output_len, a.predicted_len, a.hinted, a.tenant) for a in arrivals]


def test_hints() -> None:
    assert all(said == true and not hinted for true, said, hinted, _ in told(ExactHints()))
    assert all(said == 10 * true and hinted for true, said, hinted, _ in told(ScaledHints(10.0)))
    shuffled = told(ShuffledHints())
    assert sorted(said for _, said, _, _ in shuffled) == sorted(true for true, _, _, _ in shuffled)
    assert sum(said != true for true, said, _, _ in shuffled) > 1900
    noisy = told(NoisyHints(50.0))
    assert min(said for _, said, _, _ in noisy) == 8 and not any(hinted for _, _, hinted, _ in noisy)
    liars = told(MisleadingHints(0.25, 0.1, rmse=10.0, tenant="liars"))
    assert sum(tenant == "liars" for *_, tenant in liars) / 2000 == pytest.approx(0.25, abs=0.03)
    assert all(said == max(1, round(true / 10)) for true, said, _, tenant in liars if tenant == "liars")
    assert {tenant for *_, tenant in told(MisleadingHints(0.25, 0.1, rmse=10.0))} == {""}


def test_a_class_may_have_hints_of_its_own() -> None:
    own = TrafficClass("own", Fixed(5), Fixed(5), hints=ScaledHints(2.0))
    arrivals = Workload([SHORT, own], rate=1.0, hints=ExactHints()).requests(200, 0)
    assert {a.predicted_len for a in arrivals if a.slo is None} == {10}
    assert all(a.predicted_len == a.output_len for a in arrivals if a.slo is not None)
