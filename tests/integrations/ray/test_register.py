"""Engines in the directory, and its counts of requests."""

from roseinfer.core.clock import ManualClock
from roseinfer.integrations.ray.register import (
    EXPIRY_S,
    SETTLE_S,
    EngineRegistry,
    RegisteredEngine,
    RequestCounts,
    RequestTotals,
)


def test_engines_get_numbers_that_no_engine_has_had() -> None:
    registry = EngineRegistry(ManualClock())
    assert registry.register("a:1", "x", None, False) == 0
    assert registry.register("a:2", "y", None, False) == 1
    assert registry.register("a:2", "y", None, False) == 1, "a repeated registration"
    registry.remove("y")
    assert registry.register("a:2", "z", None, False) == 2
    assert registry.engines() == [RegisteredEngine(0, "a:1", "x"), RegisteredEngine(2, "a:2", "z")]


def test_the_version_changes_only_with_the_engines() -> None:
    registry = EngineRegistry(ManualClock(), first_version=7)
    assert registry.version == 7
    registry.register("a:1", "x", None, False)
    seen = registry.version
    registry.register("a:1", "x", 0, False)
    registry.remove("nobody")
    assert registry.version == seen
    registry.register("a:1", "x", 0, True)
    assert registry.version > seen and registry.engines() == [RegisteredEngine(0, "a:1", "x", retiring=True)]


def test_a_restarted_registry_gives_no_number_that_an_engine_may_still_have() -> None:
    clock = ManualClock()
    registry = EngineRegistry(clock, restarted=True)
    assert registry.register("a:9", "new", None, False) is None and registry.engines() == []
    assert registry.register("a:1", "old", 4, False) == 4, "engines report their numbers"
    clock.advance(SETTLE_S)
    assert registry.register("a:9", "new", None, False) == 5


def test_a_reserved_number_is_given_to_no_other_engine() -> None:
    clock = ManualClock()
    registry = EngineRegistry(clock, restarted=True)
    registry.reserve(6)
    clock.advance(SETTLE_S)
    assert registry.register("a:9", "new", None, False) == 7
    assert registry.register("a:1", "old", 6, False) == 6, "its engine registers late"


def test_an_engine_that_stops_registering_is_removed() -> None:
    clock = ManualClock()
    registry = EngineRegistry(clock)
    registry.register("a:1", "x", None, False)
    clock.advance(EXPIRY_S - 1)
    registry.register("a:2", "y", None, False)
    assert registry.expire() == []
    clock.advance(2)
    assert registry.expire() == [RegisteredEngine(0, "a:1", "x")]
    assert registry.engines() == [RegisteredEngine(1, "a:2", "y")]


def test_totals_are_the_counts_of_all_processes_since_their_first_reports() -> None:
    totals = RequestTotals()
    totals.report("a", RequestCounts(1000, 500, 100))
    assert totals.total == RequestCounts(0, 0, 0), "these may be in the totals of the previous directory"
    totals.report("a", RequestCounts(1010, 502, 106))
    totals.report("b", RequestCounts(0, 0, 0))
    totals.report("b", RequestCounts(5, 1, 4))
    assert totals.total == RequestCounts(15, 3, 10)


def test_the_next_engine_at_an_address_replaces_the_previous_one() -> None:
    registry = EngineRegistry(ManualClock())
    registry.register("a:1", "x", None, False)
    registry.register("a:1", "y", None, False)
    assert registry.engines() == [RegisteredEngine(1, "a:1", "y")]
