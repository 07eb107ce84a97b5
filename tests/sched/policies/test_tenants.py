"""Shares of tenants: who has had more than others lately, and for how long that counts."""

import pytest

from roseinfer.sched.policies.common.tenants import TenantShares


def test_shares_of_tenants() -> None:
    tenants = TenantShares()
    tenants.charge("a", 4.0, 0.0)
    assert tenants.excess("a", 0.0) == 0.0, "alone"
    tenants.charge("b", 2.0, 0.0)
    assert tenants.excess("a", 0.0) == pytest.approx(4 / 3 - 1)
    assert tenants.excess("b", 0.0) == tenants.excess("new", 0.0) == 0.0
    tenants.charge("b", 2.0, 30.0)
    assert tenants.excess("b", 30.0) == 0.0, "3 of 5 is within the tolerance"
    assert tenants.excess("a", 30.0) == 0.0, "30 s halve what was had"


def test_many_tenants_that_did_little_do_not_outweigh_one_that_works() -> None:
    tenants = TenantShares()
    tenants.charge("works", 10.0, 0.0)
    for number in range(1000):
        tenants.charge(f"idle{number}", 0.01, 0.0)
    assert tenants.excess("works", 0.0) == 3.0


def test_an_excess_is_forgotten_though_nobody_is_charged() -> None:
    tenants = TenantShares()
    tenants.charge("greedy", 40.0, 0.0)
    tenants.charge("modest", 0.4, 0.0)
    assert tenants.excess("greedy", 1.0) == pytest.approx(40 / 20.2 - 1)
    assert tenants.excess("greedy", 3600.0) == 0.0, "an idle hour later"
    tenants.charge("modest", 1.0, 3601.0)
    assert tenants.excess("greedy", 3601.0) == 0.0 and tenants.excess("modest", 3601.0) == 0.0


def test_looking_often_forgets_no_faster() -> None:
    often, once = TenantShares(), TenantShares()
    for tenants in (often, once):
        tenants.charge("a", 8.0, 0.0)
        tenants.charge("b", 1.0, 0.0)
    for second in range(1, 300):
        often.excess("a", second / 10)
    for tenants in (often, once):
        tenants.charge("b", 3.0, 30.0)
    assert often.excess("a", 30.0) == pytest.approx(once.excess("a", 30.0)) == pytest.approx(4 / 3.75 - 1, abs=0.3)
