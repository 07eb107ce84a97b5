"""Bounds: cases that can be computed by hand, and runs that must not beat them."""

import random
from dataclasses import replace

import pytest

from benchmarks.research.bound import blind_bound, capacity, fluid_bound, limits, static_bound
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine, PeriodicStalls
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.setups import SETUPS
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival, poisson

MACHINE = Machine(cost=CostParams(step_s=0.010, token_s=1e-3, pair_s=0.0, row_s=1e-3, context_s=0.0))
TIGHT, LOOSE = Slo(ttft_s=0.05, tpot_s=0.02), Slo(ttft_s=0.05, tpot_s=0.1)


def request(slo: Slo | None, *, at_s: float = 0.0, prompt: int = 100, output: int = 101) -> Arrival:
    """Return a request of 0.1 s of prefill and as much decoding by default."""
    return Arrival(at_s, [1] * prompt, output, slo)


def patient(slo: Slo) -> Slo:
    """Allow enough time for the prompt above, and less than the output needs."""
    return Slo(ttft_s=0.5, tpot_s=slo.tpot_s)


def test_half_of_the_machine_is_left_at_a_pace_of_two_steps() -> None:
    """At 5/s, a share u of the requests holds its pace for a share u of the time, which leaves 1 - u / 2."""
    mix = [request(patient(TIGHT))]
    assert static_bound(mix, MACHINE, 2.4) == pytest.approx(1.0)
    assert static_bound(mix, MACHINE, 5.0) == pytest.approx(2 / 3, abs=0.001)
    assert capacity(mix, MACHINE, target=1 - 1e-9) == pytest.approx(2.5, rel=0.01)


def test_paces_share_the_time() -> None:
    """At 5/s, the loose class needs half a second of work per second, and the tight one what .9 - .4 u leaves, u its
    share.
    """
    mix = [request(patient(TIGHT)), request(patient(LOOSE))]
    assert static_bound(mix, MACHINE, 5.0) == pytest.approx(0.5 + 0.5 * 4 / 9, abs=0.002)


def test_short_requests_first() -> None:
    """The short class takes .375 s of what a loose pace leaves of a second, the long one .75 s."""
    mix = [request(patient(LOOSE), output=51), request(patient(LOOSE), output=201)]
    assert static_bound(mix, MACHINE, 5.0) == pytest.approx(0.5 + 0.5 * (0.9 - 0.375) / 0.75, abs=0.002)


def test_a_pace_is_held_only_while_somebody_runs_at_it() -> None:
    """One tight request in a hundred runs for 2 s: rarely present at 1/s."""
    mix = [request(patient(TIGHT))] + [request(patient(LOOSE))] * 99
    assert static_bound(mix, MACHINE, 4.2) > 0.999
    assert capacity(mix, MACHINE) > 4.2


def test_best_effort_costs_nothing_and_does_not_count() -> None:
    mix = [request(patient(TIGHT)), request(None), request(Slo())]
    assert static_bound(mix, MACHINE, 15.0) == pytest.approx(2 / 3, abs=0.001)
    assert capacity(mix, MACHINE) == pytest.approx(3 * capacity(mix[:1], MACHINE), rel=0.01)


def test_without_a_pace_only_work_counts() -> None:
    assert static_bound([request(Slo(ttft_s=0.5))], MACHINE, 10.0) == pytest.approx(0.5, abs=0.001)


def test_a_whole_requests_time_becomes_the_loosest_pace_that_keeps_it() -> None:
    """2.11 s less the prompt and its step, by 100 steps: 20 ms."""
    assert static_bound([request(Slo(e2e_s=2.11))], MACHINE, 5.0) == pytest.approx(2 / 3, abs=0.002)


def test_who_could_not_be_good_alone_is_lost() -> None:
    hopeless = request(Slo(ttft_s=0.1, tpot_s=0.02))
    assert static_bound([hopeless, request(patient(LOOSE))], MACHINE, 0.1) == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="idle"):
        capacity([hopeless], MACHINE)


def test_no_objectives_no_bound() -> None:
    with pytest.raises(ValueError, match="objectives"):
        capacity([request(None)], MACHINE)


def test_more_requests_are_never_served_better() -> None:
    setup = SETUPS["scorpio-8b"]
    mix = setup.mix.requests([0.0] * 400, seed=1)
    shares = [static_bound(mix, setup.machine, rate) for rate in (1, 3, 6, 8, 10, 15, 25, 50)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.999 > shares[-1]


def test_noise_and_stalls_take_time() -> None:
    mix = [request(patient(TIGHT))]
    noisy = Machine(cost=MACHINE.cost, noise=0.1)
    stalling = Machine(cost=MACHINE.cost, stalls=PeriodicStalls(every_s=10.0, lasts_s=1.0))
    assert capacity(mix, noisy) < 0.93 * capacity(mix, MACHINE)
    assert capacity(mix, stalling) < 0.93 * capacity(mix, MACHINE)


def test_two_requests_and_a_machine_for_one() -> None:
    """Each takes .1 s of work that is due after .15 s."""
    slo = Slo(e2e_s=0.15)
    two = [request(slo, output=1), request(slo, output=1)]
    assert fluid_bound(two[:1], MACHINE) == 1.0
    assert fluid_bound(two, MACHINE) == pytest.approx(0.75, abs=0.01)
    later = [two[0], request(slo, at_s=0.15, output=1)]
    assert fluid_bound(later, MACHINE) == 1.0


def test_first_tokens_are_due() -> None:
    """Ten prompts of .1 s within .3 s; decoding has no deadline."""
    assert fluid_bound([request(Slo(ttft_s=0.3))] * 10, MACHINE) == pytest.approx(0.3, abs=0.01)


def test_what_is_never_due_gets_done() -> None:
    assert fluid_bound([request(Slo(tpot_s=0.02))] * 50, MACHINE) == 1.0


def test_nothing_fits() -> None:
    assert fluid_bound([request(Slo(ttft_s=0.05))] * 3, MACHINE) == 0.0
    with pytest.raises(ValueError, match="objectives"):
        fluid_bound([request(None)], MACHINE)


def test_a_tight_pace_takes_time_from_all() -> None:
    """The same work at a pace of two steps and of ten."""
    tight = [request(patient(TIGHT), at_s=0.2 * i) for i in range(100)]
    loose = [request(patient(LOOSE), at_s=0.2 * i) for i in range(100)]
    assert fluid_bound(tight, MACHINE) < 0.85 < fluid_bound(loose, MACHINE)


def test_a_slower_machine_does_less() -> None:
    slower = Machine(cost=MACHINE.cost, slowdown=((0.0, 1.0), (10.0, 2.0)))
    load = [request(patient(TIGHT), at_s=0.4 * i) for i in range(50)]
    assert fluid_bound(load, slower) < 0.9 < fluid_bound(load, MACHINE)


@pytest.mark.exhaustive
def test_denser_arrivals_are_never_served_better() -> None:
    setup = SETUPS["scorpio-8b"]
    shares = [
        fluid_bound(setup.mix.requests(poisson(rate, 600, seed=1), seed=1), setup.machine) for rate in (5, 25, 75)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > shares[-1] + 0.1


def small_load(number: int) -> tuple[list[Arrival], Machine]:
    """Return 60 requests at up to six times the machine's capacity."""
    rng = random.Random(number)
    cost = CostParams(0.010, rng.choice((1e-4, 5e-4)), rng.choice((0.0, 1e-6)), rng.choice((1e-4, 1e-3)), 1e-6)
    slos = (
        Slo(0.3, 0.02, class_name="a"),
        Slo(1.0, 0.03, class_name="b"),
        Slo(3.0, 0.1, class_name="c"),
        Slo(ttft_s=0.5, class_name="d"),
        Slo(tpot_s=0.03, class_name="e"),
        Slo(e2e_s=2.0, class_name="f"),
    )
    classes = rng.sample(slos, rng.choice((1, 2, 4)))
    rate, now, found = rng.choice((4.0, 10.0, 30.0)), 0.0, []
    for _ in range(60):
        now += rng.expovariate(rate)
        ids = [rng.randrange(3, 1000) for _ in range(rng.randint(10, 400))]
        found.append(Arrival(now, ids, rng.choice((1, 20, 60, 150)), rng.choice(classes)))
    noise = rng.choice((0.0, 0.1))
    return found, Machine(cost=cost, noise=noise, prefix_caching=False)


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 12))])
def test_no_policy_beats_the_bound(number: int) -> None:
    arrivals, machine = small_load(number)
    bound = fluid_bound(arrivals, machine)
    for policy in ("fifo", "qoserve", "slack"):
        lives = simulate(arrivals, scheduler_config(scheduling_policy=policy), machine).lifetimes
        assert sum(life.good for life in lives) / len(lives) <= bound + 1e-9


def test_limits_of_outputs() -> None:
    """Lengths 1, 2 and 11: no step, one, and nine more for a third of the requests."""
    assert limits([2, 1, 11]) == [(0.0, 0.0, 0.0)] + [
        pytest.approx(each) for each in ((1 / 3, 0.0, 0.0), (2 / 3, 2 / 3, 4 / 3), (1.0, 11 / 3, 4 / 3 + 63 / 3))
    ]


def test_limits_that_a_mixture_beats_are_left_out() -> None:
    """Stopping at 100 is worse than never stopping: the next tenth costs a step, the ninth has cost a hundred."""
    assert [share for share, _, _ in limits([100] * 1 + [101] * 9)] == [0.0, 1.0]


def test_who_knows_no_lengths_serves_fewer() -> None:
    setup = SETUPS["scorpio-8b"]
    load = setup.mix.requests(poisson(40.0, 200, seed=2), seed=2)
    blind, patient_blind = (blind_bound(load, setup.machine, stops=stops) for stops in (True, False))
    assert patient_blind < blind < fluid_bound(load, setup.machine) - 0.02


def test_equal_lengths_are_known() -> None:
    load = [request(patient(LOOSE), at_s=0.1 * i) for i in range(60)]
    assert blind_bound(load, MACHINE) == pytest.approx(fluid_bound(load, MACHINE), abs=0.01)


def test_with_experts_it_is_above_what_a_policy_reaches_and_says_more_than_without_them() -> None:
    setup = SETUPS["moe-30b"]
    arrivals = setup.mix.requests(poisson(6.0, 80, 3), 3)
    found = simulate(arrivals, scheduler_config(scheduling_policy="slack"), setup.machine)
    reached = sum(life.good for life in found.lifetimes) / len(arrivals)
    bound = fluid_bound(arrivals, setup.machine)
    assert 0.5 < reached <= bound
    slower = replace(setup.machine, cost=replace(setup.machine.cost, expert_s=1.5e-3))
    assert fluid_bound(arrivals, slower) < bound, "8 experts take 12 ms, more than all objectives"
