"""The directory's knowledge of engines and of how requests fared."""

from roseinfer.core.clock import ManualClock
from roseinfer.integrations.ray.register import EXPIRE_S, SETTLE_S, Attainment, Fared, Register, RegisteredEngine


def test_engines_get_numbers_that_nobody_has_had() -> None:
    register = Register(ManualClock())
    assert register.tell("a:1", "x", None, False) == 0
    assert register.tell("a:2", "y", None, False) == 1
    assert register.tell("a:2", "y", None, False) == 1, "asked again, before the answer came"
    register.gone("y")
    assert register.tell("a:2", "z", None, False) == 2
    assert register.engines() == [RegisteredEngine(0, "a:1", "x"), RegisteredEngine(2, "a:2", "z")]


def test_the_version_changes_with_the_engines_and_only_then() -> None:
    register = Register(ManualClock(), first_version=7)
    assert register.version == 7
    register.tell("a:1", "x", None, False)
    seen = register.version
    register.tell("a:1", "x", 0, False)
    register.gone("nobody")
    assert register.version == seen
    register.tell("a:1", "x", 0, True)
    assert register.version > seen and register.engines() == [RegisteredEngine(0, "a:1", "x", retiring=True)]


def test_a_register_made_anew_gives_no_number_that_an_engine_may_still_have() -> None:
    clock = ManualClock()
    register = Register(clock, anew=True)
    assert register.tell("a:9", "new", None, False) is None and register.engines() == []
    assert register.tell("a:1", "old", 4, False) == 4, "engines bring the numbers that they have"
    clock.advance(SETTLE_S)
    assert register.tell("a:9", "new", None, False) == 5


def test_a_number_that_anybody_has_heard_of_is_given_to_no_other_engine() -> None:
    clock = ManualClock()
    register = Register(clock, anew=True)
    register.known(6)
    clock.advance(SETTLE_S)
    assert register.tell("a:9", "new", None, False) == 7
    assert register.tell("a:1", "old", 6, False) == 6, "it could not reach the directory before"


def test_an_engine_that_tells_nothing_is_forgotten() -> None:
    clock = ManualClock()
    register = Register(clock)
    register.tell("a:1", "x", None, False)
    clock.advance(EXPIRE_S - 1)
    register.tell("a:2", "y", None, False)
    assert register.expire() == []
    clock.advance(2)
    assert register.expire() == [RegisteredEngine(0, "a:1", "x")]
    assert register.engines() == [RegisteredEngine(1, "a:2", "y")]


def test_attainment_is_what_all_processes_have_counted_since() -> None:
    attainment = Attainment()
    attainment.report("a", Fared(1000, 500, 100))
    assert attainment.total == Fared(0, 0, 0), "it counted that for the directory before"
    attainment.report("a", Fared(1010, 502, 106))
    attainment.report("b", Fared(0, 0, 0))
    attainment.report("b", Fared(5, 1, 4))
    assert attainment.total == Fared(15, 3, 10)


def test_the_next_engine_at_an_address_takes_the_place_of_the_one_before() -> None:
    register = Register(ManualClock())
    register.tell("a:1", "x", None, False)
    register.tell("a:1", "y", None, False)
    assert register.engines() == [RegisteredEngine(1, "a:1", "y")]
