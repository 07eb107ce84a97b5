"""benchmarks/lost_hosts: what it makes of answers."""

import json

import pytest

from benchmarks.fleet_load import Seen
from benchmarks.lost_hosts import __main__ as lost_hosts

METRICS = """
roseinfer:slo_requests_total{engine="all",outcome="met"} 1.0
roseinfer:slo_requests_total{engine="all",outcome="missed_tpot"} 1.0
roseinfer:router_resumes_total{engine="0",cause="quiet"} 2.0
roseinfer:router_placed_again_total{engine="0",cause="quiet"} 1.0
"""


def seen(*chunk_s: float, text: str = "a", ok: bool = True) -> Seen:
    return Seen(lost_hosts.SLO, ok=ok, status=200, output_tokens=len(chunk_s), text=text, chunk_s=list(chunk_s))


def test_what_is_told_of_a_case() -> None:
    found = lost_hosts.told("cut", [seen(0.1, 0.2, 2.2, 2.3), seen(0.3, 0.4)], METRICS)
    assert found["moved"] == 3 and found["counted"] == 2 and found["wrong"] == 0
    assert found["pause s (median)"] == found["pause s (most)"] == 2.0 and found["first token s (most)"] == 0.3


def test_what_is_not_as_it_should_be() -> None:
    well = {"case": "cut", "wrong": 0, "other text": 0, "held": 0, "counted": 2, "streams": 2}
    assert lost_hosts.faults(well) == []
    assert lost_hosts.faults({**well, "counted": 3, "held": 1.0}) == ["cut: held 1.0", "cut: counted 3"]


def test_texts_are_compared_of_streams_that_ended_well() -> None:
    wanted = [seen(0.1), seen(0.1), seen(0.1)]
    assert lost_hosts.other_texts([seen(0.1), seen(0.1, text="b"), seen(0.1, text="b", ok=False)], wanted) == 1


def test_no_two_requests_are_alike() -> None:
    bodies = [json.loads(each.body) for each in lost_hosts.load(8)]
    assert len({body["seed"] for body in bodies}) == len({tuple(body["prompt"][:2]) for body in bodies}) == len(bodies)


def test_every_case_can_happen() -> None:
    scene = lost_hosts.Scene("none", None)  # type: ignore[arg-type]
    assert all(hasattr(scene, f"_{case}") for case in lost_hosts.CASES if case != "none")
    with pytest.raises(SystemExit):
        lost_hosts.parse(["--cases", "flood"])
