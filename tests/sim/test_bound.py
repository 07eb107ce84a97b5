"""Bounds: cases that can be computed by hand, and runs that must not beat them."""

import pytest

from roseinfer.core.slo import Slo
from roseinfer.sched.cost import CostParams
from roseinfer.sim.bound import capacity, static_bound
from roseinfer.sim.machine import Machine, Stalls
from roseinfer.sim.setups import SETUPS
from roseinfer.sim.workload import Arrival

MACHINE = Machine(cost=CostParams(step_s=0.010, token_s=1e-3, pair_s=0.0, row_s=1e-3, context_s=0.0))
TIGHT, LOOSE = Slo(ttft_s=0.05, tpot_s=0.02), Slo(ttft_s=0.05, tpot_s=0.1)


def request(slo: Slo | None, *, at_s: float = 0.0, prompt: int = 100, output: int = 101) -> Arrival:
    """By default 0.1 s of prefill and as much decoding."""
    return Arrival(at_s, [1] * prompt, output, slo)


def patient(slo: Slo) -> Slo:
    """Time enough for the prompt above, and less than the output needs."""
    return Slo(ttft_s=0.5, tpot_s=slo.tpot_s)


# --- for ever ---------------------------------------------------------------------------------------------------
def test_half_of_the_machine_is_left_at_a_pace_of_two_steps() -> None:
    """At 5/s: a share u of the requests in a share u of the time, which leaves 1 - u / 2."""
    mix = [request(patient(TIGHT))]
    assert static_bound(mix, MACHINE, 2.4) == pytest.approx(1.0)
    assert static_bound(mix, MACHINE, 5.0) == pytest.approx(2 / 3, abs=0.001)
    assert capacity(mix, MACHINE, target=1 - 1e-9) == pytest.approx(2.5, rel=0.01)


def test_paces_share_the_time() -> None:
    """At 5/s: the loose need half a second of work of each, and the tight what .9 - .4 u leaves, u being theirs."""
    mix = [request(patient(TIGHT)), request(patient(LOOSE))]
    assert static_bound(mix, MACHINE, 5.0) == pytest.approx(0.5 + 0.5 * 4 / 9, abs=0.002)


def test_short_requests_first() -> None:
    """The short take .375 s of what a loose pace leaves of a second, the long .75 s."""
    mix = [request(patient(LOOSE), output=51), request(patient(LOOSE), output=201)]
    assert static_bound(mix, MACHINE, 5.0) == pytest.approx(0.5 + 0.5 * (0.9 - 0.375) / 0.75, abs=0.002)


def test_a_pace_is_held_only_while_somebody_runs_at_it() -> None:
    """One tight request in a hundred, there for 2 s: at 1/s hardly ever."""
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
    stalling = Machine(cost=MACHINE.cost, stalls=Stalls(every_s=10.0, lasts_s=1.0))
    assert capacity(mix, noisy) < 0.93 * capacity(mix, MACHINE)
    assert capacity(mix, stalling) < 0.93 * capacity(mix, MACHINE)
