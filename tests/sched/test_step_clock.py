"""Steps as whoever waits for them sees them."""

from roseinfer.sched.scheduler import StepClock


def test_a_step_alone_lasts_from_the_end_of_the_one_before_it() -> None:
    clock = StepClock()
    clock.planned(0, 10.0)
    assert clock.done(0, 10.75, 0.5, more=True) == 0.75, "a quarter of a second on the host"
    clock.planned(1, 11.0)
    assert clock.done(1, 11.5, 0.25, more=True) == 0.75, "from 10.75 on: the outputs were sent in between"


def test_a_pause_is_no_part_of_a_step() -> None:
    clock = StepClock()
    clock.planned(0, 10.0)
    clock.done(0, 11.0, 1.0, more=False)
    clock.planned(1, 20.0)
    assert clock.done(1, 20.5, 0.25, more=True) == 0.5
    clock.paused()  # there was more to do, but nothing was planned
    clock.planned(2, 25.0)
    assert clock.done(2, 25.5, 0.25, more=False) == 0.5


def test_behind_another_step_the_device_alone_counts() -> None:
    clock = StepClock()
    clock.planned(0, 10.0)
    clock.planned(1, 10.1)
    assert clock.done(0, 11.5, 1.0, more=True) == 1.5
    clock.planned(2, 11.6)
    assert clock.done(1, 12.5, 1.0, more=True) == 1.0
    assert clock.done(2, 99.0, 1.0, more=True) == 1.0


def test_a_clock_that_stands_still_does_not_shorten_steps() -> None:
    clock = StepClock()
    clock.planned(0, 0.0)
    assert clock.done(0, 0.0, 0.5, more=True) == 0.5
