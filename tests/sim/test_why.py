"""Causes are true: without what a request waits for, it starts. `benchmarks/why_truth.py` has more."""

from benchmarks.why_loads import LOADS
from benchmarks.why_truth import truth
from roseinfer.core.slo import Cause
from tests.helpers.cases import cases

LOAD = {load.name: load for load in LOADS}


@cases(
    ("load", "policy", "requests", "causes"),
    [
        ("few blocks", "slack", 60, {Cause.BLOCKS}),
        ("few seats", "fifo", 60, {Cause.SEATS}),
    ],
    exhaustive=[
        ("small budget", "slack", 80, {Cause.BUDGET}),
        ("bursts", "slack", 150, {Cause.PRICE, Cause.UTILISATION}),
        ("tenants", "slack", 300, {Cause.TENANT, Cause.PRICE}),
    ],
)
def test_without_its_cause_it_starts(load: str, policy: str, requests: int, causes: set[Cause]) -> None:
    found = truth(LOAD[load], policy, requests=requests, samples=1, window_s=1.0, kinds=("waits",))
    waits = [case for case in found if case.kind == "waits"]
    assert causes <= {case.sample.cause for case in waits}
    assert not [case for case in waits if not case.true]


def test_what_is_said_to_be_attainable_is_kept() -> None:
    found = truth(LOAD["hasty"], "slack", requests=80, samples=3, window_s=1.0, kinds=("refused",))
    assert {case.kind for case in found} == {"refused", "attainable", "kept"}
    assert not [case for case in found if not case.true]
