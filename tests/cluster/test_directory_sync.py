"""Directory of engines and its synchronisation with a client."""

import asyncio
from collections.abc import Callable

import pytest

from roseinfer.cluster.directory import Directory, DynamicDirectory, EngineEntry, FixedDirectory
from roseinfer.cluster.directory_sync import DirectorySync
from roseinfer.cluster.endpoint import Connector
from roseinfer.core.errors import ConfigError
from tests.helpers.in_loop import PATIENCE_S
from tests.helpers.model_engine import ModelEngine
from tests.helpers.routed_fleet import NO_BOARD


def make_connector(entry: EngineEntry, number: int) -> Connector:
    if entry.address == "nowhere":
        raise ConfigError("no such address")
    if entry.address == "faulty":
        raise KeyError(entry.address)
    return Connector(ModelEngine, NO_BOARD)


class Engines:
    """Engines of a routed engine, without real engines."""

    def __init__(self) -> None:
        self.there: list[int] = []
        self.said: list[tuple[object, ...]] = []
        self._next = 0

    def add(self, make_connector: Callable[[int], Connector], number: int | None = None) -> int:
        make_connector(self._next)
        self._next += 1
        self.there.append(self._next - 1)
        self.said.append(("add", self._next - 1, number))
        return self._next - 1

    def retire(self, number: int, patience_s: float) -> None:
        self.said.append(("retire", number, patience_s))

    def set_listed(self, number: int, listed: bool) -> None:
        assert number in self.there
        if not listed:
            self.said.append(("unlisted", number))

    def has(self, number: int) -> bool:
        return number in self.there

    def news(self) -> list[tuple[object, ...]]:
        said, self.said = self.said, []
        return said


A, B = EngineEntry("a:1"), EngineEntry("b:1", "x", number=5)


def followed(directory: Directory) -> tuple[DirectorySync, Engines]:
    engines = Engines()
    return DirectorySync(directory, make_connector, engines, 3.0), engines


def test_engines_are_those_that_are_named() -> None:
    directory = DynamicDirectory([A])
    follower, engines = followed(directory)
    follower.sync()
    assert engines.news() == [("add", 0, None)]
    directory.set_entries([A, B])
    follower.sync()
    follower.sync()
    assert engines.news() == [("add", 1, 5)]


def test_another_incarnation_is_another_engine() -> None:
    directory = DynamicDirectory([A])
    follower, engines = followed(directory)
    follower.sync()
    directory.set_entries([A._replace(incarnation="2")])
    follower.sync()
    assert engines.news() == [("add", 0, None), ("unlisted", 0), ("add", 1, None)]


def test_an_engine_retires_once_and_for_good() -> None:
    directory = DynamicDirectory([A, B])
    follower, engines = followed(directory)
    follower.sync()
    directory.set_entries([A._replace(retiring=True), B])
    follower.sync()
    follower.sync()
    assert engines.news()[2:] == [("retire", 0, 3.0)]
    engines.there.remove(0)
    follower.sync()
    directory.set_entries([B])
    follower.sync()
    assert engines.news() == []


def test_an_engine_that_retires_before_it_was_known_is_not_added() -> None:
    follower, engines = followed(DynamicDirectory([A._replace(retiring=True)]))
    follower.sync()
    assert engines.news() == []


def test_an_unlisted_engine_is_not_retired_and_is_added_again_if_removed() -> None:
    directory = DynamicDirectory([A, B])
    follower, engines = followed(directory)
    follower.sync()
    directory.set_entries([])
    follower.sync()
    assert engines.news()[2:] == [("unlisted", 0), ("unlisted", 1)]
    engines.there.remove(0)
    directory.set_entries([A, B])
    follower.sync()
    assert engines.news() == [("add", 2, None)]


def test_an_unusable_address_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    directory = DynamicDirectory([EngineEntry("nowhere"), A])
    follower, engines = followed(directory)
    follower.sync()
    follower.sync()
    assert engines.news() == [("add", 0, None)]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "cannot use the engine at nowhere: no such address"
    ]


def test_a_fault_with_one_engine_does_not_affect_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    follower, engines = followed(DynamicDirectory([EngineEntry("faulty"), A]))
    follower.sync()
    follower.sync()
    assert engines.news() == [("add", 0, None)]
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["cannot use the engine at faulty"]


def test_changes_of_the_directory_are_applied_in_the_background() -> None:
    async def main() -> None:
        directory = DynamicDirectory()
        follower, engines = followed(directory)
        task = asyncio.create_task(follower.run())
        for tell, news in (([A], [("add", 0, None)]), ([A, B], [("add", 1, 5)]), ([A, B], [])):
            directory.set_entries(tell)
            async with asyncio.timeout(PATIENCE_S):
                while news and not engines.said:
                    await asyncio.sleep(0)
            assert engines.news() == news
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())


def test_a_fixed_list_never_changes() -> None:
    async def main() -> None:
        directory = FixedDirectory(["a:1", "b:1"])
        assert [(entry.address, entry.number) for entry in directory.entries()] == [("a:1", 0), ("b:1", 1)]
        changed = asyncio.create_task(directory.changed())
        await asyncio.sleep(0)
        assert not changed.done()
        changed.cancel()

    asyncio.run(main())
