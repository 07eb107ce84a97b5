"""Fullness of an engine, and the number of engines that follows."""

from dataclasses import replace
from math import e, inf

import pytest

from roseinfer.core.promise import Promise
from roseinfer.core.step_cost import StepCost
from roseinfer.router.fleet_size import FleetSizeRule, FleetState, fleet_size
from roseinfer.router.fleet_size import fullness as fullness_at

IDLE = Promise(0.0, free_seats=32, free_blocks=100, blocks=100)
FULL = IDLE._replace(running=32, free_seats=0)


def fullness(promise: Promise, after_s: float = 0.0) -> float:
    return fullness_at(promise, promise.at_s + after_s)


def test_an_engine_is_as_full_as_its_scarcest_resource() -> None:
    assert fullness(IDLE) == 0.0
    assert fullness(IDLE._replace(running=8, free_seats=24)) == pytest.approx(0.25), "seats"
    assert fullness(IDLE._replace(running=8, free_seats=24, free_blocks=40)) == pytest.approx(0.6), "memory"
    assert fullness(IDLE._replace(running=8, free_seats=24, prompt_share=0.7)) == pytest.approx(0.7), "prompts"
    assert fullness(IDLE._replace(running=8, free_seats=24, free_blocks=40, arriving=0.9)) == pytest.approx(0.9)
    assert fullness(FULL) == 1.0, "all seats are taken, and nothing waits"
    assert fullness(Promise(0.0)) == 0.0, "nothing is known"


def test_waiting_requests_count_by_their_age() -> None:
    queued = FULL._replace(waiting=32)
    assert fullness(queued) == 1.0, "they have just arrived"
    assert fullness(queued._replace(oldest_wait_s=1.5)) == pytest.approx(1.5)
    assert fullness(queued._replace(oldest_wait_s=2.0)) == pytest.approx(2.0), "two engines would run all of them"
    assert fullness(queued._replace(oldest_wait_s=60.0)) == pytest.approx(2.0)
    assert fullness(queued._replace(waiting=10_000, oldest_wait_s=60.0)) == 4.0, "one burst counts so much at most"
    assert fullness(IDLE._replace(waiting=1, oldest_wait_s=60.0)) == 1.0, "it waits though seats are free"


def test_prompts_that_take_long_count_though_seats_are_free() -> None:
    filling = IDLE._replace(running=4, free_seats=28)
    assert fullness(filling._replace(oldest_wait_s=0.2)) == pytest.approx(0.125)
    assert fullness(filling._replace(oldest_wait_s=1.8)) == pytest.approx(0.9)


def test_the_share_of_prompts_decays_while_an_engine_is_idle() -> None:
    idle = IDLE._replace(at_s=100.0, prompt_share=0.9)
    assert fullness(idle) == pytest.approx(0.9)
    assert fullness(idle, after_s=10.0) == pytest.approx(0.9 / e)
    assert fullness(idle, after_s=60.0) < 0.01


def test_the_cost_of_empty_steps_counts_neither_as_demand_nor_as_capacity() -> None:
    """.5 of the time goes into steps at the pace of the tightest, .2 of the other half into what is in them."""
    promised = Promise(
        0.0, cost=StepCost(0.02, 1e-4, 1e-4), usable_share=1.0, smallest_s=0.04, busy=0.05, weights=0.02, arriving=0.03
    )
    assert fullness(promised) == pytest.approx(0.2)
    assert fullness(promised._replace(smallest_s=inf)) == pytest.approx(0.1)
    assert fullness(promised._replace(smallest_s=0.01)) == pytest.approx(0.1 / 0.13)


def test_no_engine_is_removed_while_requests_wait() -> None:
    rule = FleetSizeRule(1, 3, patience_s=60.0)
    calm = FleetState(60.0, running=3, starting=0, load=0.1, too_many_rejections=False)
    assert fleet_size(rule, calm, low_since_s=0.0) == (2, 0.0)
    assert fleet_size(rule, replace(calm, waiting=1), low_since_s=0.0) == (3, 0.0), "as soon as none waits"
