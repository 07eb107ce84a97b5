"""Choice of the engine of a full fleet that gets no more tight requests."""

from dataclasses import dataclass

import pytest

from roseinfer.router.base import RoutingRequest
from roseinfer.router.spared import SparedEngine

TIGHT = RoutingRequest(100, output_tokens=200, ttft_left_s=1.0, tpot_s=0.02)
LOOSE = TIGHT._replace(tpot_s=0.05)


@dataclass
class Engine:
    engine: int
    pace_s: float = 0.02
    utilisation: float = 1.0


def fleet(count: int) -> list[Engine]:
    """Return engines that all have tight requests. The last one has the lowest utilisation."""
    return [Engine(number, utilisation=2.0 - number / count) for number in range(count)]


def after(loose: int, tight: int, engines: list[Engine]) -> SparedEngine:
    """Return the choice after a hundred rounds of so many requests."""
    spared = SparedEngine()
    for _ in range(100):
        for request in [LOOSE] * loose + [TIGHT] * tight:
            spared.from_request(request, engines, False)
    return spared


def test_tight_requests_leave_the_engine_with_the_lowest_utilisation() -> None:
    engines = fleet(3)
    spared = after(1, 1, engines)
    assert spared.from_request(TIGHT, engines, True) == 2
    assert spared.from_request(LOOSE, engines, True) is None, "loose requests may go there"
    engines[0].utilisation = 0.5
    assert spared.from_request(TIGHT, engines, True) == 2, "it stays the same one"


def test_the_last_engine_without_tight_requests_is_spared() -> None:
    engines = fleet(3)
    spared = after(1, 1, engines)
    engines[1].pace_s = 0.05
    assert spared.from_request(TIGHT, engines, True) is None, "tight requests avoid it anyway"
    engines[1].pace_s = 0.0201
    assert spared.from_request(TIGHT, engines, True) == 1
    assert spared.from_request(TIGHT, [engines[0], engines[2], Engine(3, utilisation=0.1)], True) == 3, "it is gone"


@pytest.mark.parametrize(("loose", "tight"), [(0, 1), (1, 4)])
def test_none_is_spared_without_enough_loose_requests(loose: int, tight: int) -> None:
    engines = fleet(3)
    assert after(loose, tight, engines).from_request(TIGHT, engines, True) is None


def test_none_is_spared_of_two_or_while_there_is_room() -> None:
    assert after(1, 1, fleet(2)).from_request(TIGHT, fleet(2), True) is None
    assert after(1, 1, fleet(3)).from_request(TIGHT, fleet(3), False) is None
