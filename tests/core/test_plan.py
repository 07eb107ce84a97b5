"""Rules for the loads and stores of a plan."""

from dataclasses import replace

import pytest

from roseinfer.core.plan import Admission, BlockCopy, HostCopy, Row, StepPlan
from roseinfer.core.sampling import SequenceParams

ROW = Row("a", 0, 8, 1, 1, True, 8, 2, (5,))
ADMISSION = Admission("b", 1, [1] * 9, 9, SequenceParams(), 0, (), (6,))
PLAN = StepPlan(
    0, [ROW], [ADMISSION], [BlockCopy(1, 2, 3)], loads=[HostCopy(3, 0), HostCopy(4, 0)], stores=[HostCopy(6, 1)]
)


def test_copies_that_can_go_on_beside_each_other():
    PLAN.check_host_copies(7, 2)
    replace(PLAN, stores=[HostCopy(1, 1)]).check_host_copies(7, 2)  # the source of a copy may be stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loads": [HostCopy(7, 0)]}, "outside"),
        ({"stores": [HostCopy(0, 2)]}, "outside"),
        ({"loads": [HostCopy(-1, 0)]}, "outside"),
        ({"loads": [HostCopy(3, 0), HostCopy(3, 1)], "stores": []}, "loaded twice"),
        ({"stores": [HostCopy(6, 1), HostCopy(0, 1)]}, "stored to twice"),
        ({"stores": [HostCopy(6, 0)]}, "stored to and loaded from"),
        ({"stores": [HostCopy(3, 1)]}, "loaded and stored"),
        ({"loads": [HostCopy(5, 0)]}, "loaded and written"),
        ({"loads": [HostCopy(2, 0)]}, "loaded and written"),
        ({"stores": [HostCopy(5, 1)]}, "stored and written"),
        ({"stores": [HostCopy(2, 1)]}, "stored and written"),
        ({"loads": [HostCopy(1, 0)]}, "read in the step"),
        ({"loads": [HostCopy(6, 0)], "stores": []}, "read in the step"),
    ],
)
def test_copies_that_would_race_are_named(change, message):
    with pytest.raises(AssertionError, match=message):
        replace(PLAN, **change).check_host_copies(7, 2)
