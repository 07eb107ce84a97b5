"""Simulated speculation: drafts that are right as often as is asked for, on the real scheduler."""

from dataclasses import replace

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.drafts import right_guesses
from roseinfer.sim.simulator import Lifetime, SimulationResult, simulate
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases, each_value

GPU = CostParams(
    step_s=4e-3, token_s=17e-6, row_s=13e-6, context_s=30e-9, drafts=DraftCost(0.2e-3, 60e-6, 8e-6, 17e-6, 1e-9)
)
MACHINE = Machine(cost=GPU, num_blocks=20_000, prefix_caching=False)


def run(acceptance: tuple[float, ...], count: int, length: int = 300, policy: str = "slack") -> SimulationResult:
    """Run requests of the same length, of which `count` have room at a time."""
    arrivals = [Arrival(0.0, [5] * 100, length + 7 * (i % 9)) for i in range(2 * count)]
    config = scheduler_config(scheduling_policy=policy, max_num_seqs=count, max_num_batched_tokens=2048)
    return simulate(arrivals, config, replace(MACHINE, acceptance=acceptance))


@pytest.mark.parametrize("acceptance", [0.2, 0.8])
def test_guesses_are_right_as_often_as_was_asked_for(acceptance: float) -> None:
    drawn = [right_guesses(f"{i}:0", start, 3, (acceptance,) * 3) for i in range(200) for start in range(100, 120)]
    for position in range(3):
        reached = [right for right in drawn if right >= position]
        assert sum(right > position for right in reached) / len(reached) == pytest.approx(acceptance, abs=0.1)


@each_value(policy=["fifo", "slack", "scorpio"], acceptance=[(0.5,) * 4, (1.0, 1.0), (0.05,)])
def test_outputs_are_as_long_as_without(policy: str, acceptance: tuple[float, ...]) -> None:
    found = run(acceptance, 4, 60, policy)
    assert [len(life.token_s) for life in found.lifetimes] == [60 + 7 * (i % 9) for i in range(8)]


@cases(("count", "acceptance", "least"), [(8, 0.8, 1.8)], exhaustive=[(1, 0.8, 2.0), (32, 0.6, 1.2)])
def test_right_drafts_make_it_faster(count: int, acceptance: float, least: float) -> None:
    assert run((), count).elapsed_s > least * run((acceptance,) * 4, count).elapsed_s


@cases("count", [64], exhaustive=[1, 256])
def test_wrong_drafts_hardly_make_it_slower(count: int) -> None:
    assert run((), count, 100).elapsed_s > 0.98 * run((0.2,) * 4, count, 100).elapsed_s


def elapsed_s(*, drafts: bool, exposed: bool, overlap: bool = True) -> float:
    machine = replace(MACHINE, acceptance=(0.8,) * 4 if drafts else ())
    if exposed:
        machine = replace(machine, exposed_s=1e-3, exposed_row_s=50e-6)
    config = scheduler_config(scheduling_policy="slack", max_num_seqs=16, max_num_batched_tokens=2048, overlap=overlap)
    return simulate([Arrival(0.0, [5] * 100, 200)] * 16, config, machine).elapsed_s


def test_the_work_of_the_host_is_hidden_while_two_steps_are_in_flight() -> None:
    hidden_s = elapsed_s(drafts=False, exposed=True) - elapsed_s(drafts=False, exposed=False)
    assert 0 < hidden_s < 0.01, "that of the first steps is not"
    shown_s = [elapsed_s(drafts=False, exposed=exposed, overlap=False) for exposed in (False, True)]
    assert shown_s[1] - shown_s[0] == pytest.approx(200 * 1.8e-3, rel=0.05)


def test_drafts_expose_the_work_of_the_host() -> None:
    found = {exposed: elapsed_s(drafts=True, exposed=exposed) for exposed in (False, True)}
    assert found[False] + 60 * 1.8e-3 < found[True] < elapsed_s(drafts=False, exposed=True)


@pytest.mark.parametrize(("text", "shares"), [(None, ()), ("0.8", (0.8,) * 4), ("0.8,0.6", (0.8, 0.6))])
def test_one_share_is_that_of_four_drafts(text: str | None, shares: tuple[float, ...]) -> None:
    assert WorkloadConfig(speculation_acceptance=text).acceptance == shares


@pytest.mark.parametrize("text", ["1.2", "0", "x", "0.5," * 9])
def test_impossible_shares_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="speculation_acceptance"):
        WorkloadConfig(speculation_acceptance=text)


# --- promises that need several tokens a step ---------------------------------------------------------------------
LONE_STEP_S = GPU.rows_s(1, 300)


def strict_after(seen: int, acceptance: tuple[float, ...], share: float = 0.6, beside: int = 0) -> list[Lifetime]:
    """Requests with a TPOT objective of this share of a lone step, after `seen` requests with an easy one.

    `beside`: requests with an easy objective that run at the same time.
    """
    easy, strict = Slo(tpot_s=0.1), Slo(ttft_s=5.0, tpot_s=share * LONE_STEP_S)
    arrivals = [Arrival(0.05 * i, [5] * 100, 20 + i % 30, slo=easy) for i in range(seen)]
    start_s = 0.05 * seen + 10
    for i in range(6):
        arrivals.append(Arrival(start_s + 2 * i, [5] * 100, 150 + 10 * i, slo=strict))
        arrivals += [Arrival(start_s + 2 * i + 0.1, [5] * 100, 100, slo=easy) for _ in range(beside)]
    config = scheduler_config(max_num_seqs=64, max_num_batched_tokens=2048)
    lives = simulate(arrivals, config, replace(MACHINE, acceptance=acceptance, noise=0.03)).lifetimes
    return [life for life in lives if life.slo is strict]


@cases("beside", [3], exhaustive=[0])
def test_an_objective_faster_than_a_step_is_kept_once_200_requests_were_seen(beside: int) -> None:
    for life in strict_after(230, (0.8,) * 4, beside=beside):
        assert life.served and not life.missed


@cases(
    ("seen", "acceptance", "share"),
    [(150, (0.8,) * 4, 0.6), (230, (0.3,) * 4, 0.6)],
    exhaustive=[(230, (), 0.6), (230, (0.8,) * 4, 0.2)],
)
def test_it_is_refused_if_drafts_do_not_surely_suffice(seen: int, acceptance: tuple[float, ...], share: float) -> None:
    for life in strict_after(seen, acceptance, share):
        assert life.rejection is not None and life.rejection.reason == "tpot"
