"""Client-side part of adapters: answers that are late, and engines that are gone."""

import asyncio

import pytest

from roseinfer.core.errors import EngineDeadError, InvalidRequestError, TooManyReadsError
from roseinfer.engine.adapter_client import AdapterClient
from roseinfer.engine.adapter_names import AdapterNames
from roseinfer.engine.messages import AdapterAnswer, AdapterUpdate, ReadAdapter
from tests.helpers.adapter_files import adapter
from tests.helpers.in_loop import run, until
from tests.helpers.model_engine import ModelEngine


class Wire(ModelEngine):
    """An engine that does not react to what it is sent."""

    @property
    def reads(self) -> list[ReadAdapter]:
        return [message for message in self.heard if isinstance(message, ReadAdapter)]

    @property
    def updates(self) -> list[AdapterUpdate]:
        return [message for message in self.heard if isinstance(message, AdapterUpdate)]


def test_each_read_gets_its_own_answer() -> None:
    async def main() -> None:
        wire = Wire()
        client = AdapterClient(wire)
        reads = [asyncio.create_task(client.read(name, name)) for name in ("a", "b", "d")]
        await until(lambda: len(wire.reads) == 3)
        client.take_answer(AdapterAnswer(wire.reads[2].number, error="full", busy=True))
        client.take_answer(AdapterAnswer(wire.reads[1].number, error="planted"))
        client.take_answer(AdapterAnswer(wire.reads[0].number, adapter("a")))
        client.take_answer(AdapterAnswer(99, adapter("c")))
        assert await reads[0] == adapter("a")
        with pytest.raises(InvalidRequestError, match="planted"):
            await reads[1]
        with pytest.raises(TooManyReadsError, match="full"):
            await reads[2]

    run(main())


def test_a_read_that_was_cancelled_takes_no_answer() -> None:
    async def main() -> None:
        wire = Wire()
        client = AdapterClient(wire)
        read = asyncio.create_task(client.read("a", "a"))
        await until(lambda: bool(wire.reads))
        read.cancel()
        client.take_answer(AdapterAnswer(wire.reads[0].number, adapter("a")))
        with pytest.raises(asyncio.CancelledError):
            await read
        client.take_answer(AdapterAnswer(wire.reads[0].number, adapter("a")))

    run(main())


def test_a_name_is_settled_when_the_engine_has_passed_it_on() -> None:
    async def main() -> None:
        wire = Wire()
        client = AdapterClient(wire)
        client.start([adapter("old")])
        await client.set("old", adapter("old"))
        settled = asyncio.create_task(client.set("a", adapter("a")))
        await until(lambda: bool(wire.updates))
        client.take_names({})
        await asyncio.sleep(0.01)
        assert not settled.done()
        client.take_names(wire.updates[0].entries)
        await settled

    run(main())


def test_an_engine_that_is_gone_ends_all_waits() -> None:
    async def main() -> None:
        client = AdapterClient(Wire())
        waits = [asyncio.create_task(client.set("a", adapter("a"))), asyncio.create_task(client.read("b", "b"))]
        await asyncio.sleep(0)
        client.fail(EngineDeadError("planted"))
        await waits[0]
        with pytest.raises(EngineDeadError, match="planted"):
            await waits[1]

    run(main())


def test_only_news_are_sent() -> None:
    wire, other = Wire(), AdapterNames([adapter("a")])
    client = AdapterClient(wire)
    client.start([adapter("a")])
    client.send(other.entries)
    assert not wire.updates
    other.set("a", None)
    client.send(other.entries)
    client.send(other.entries)
    assert [list(update.entries) for update in wire.updates] == [["a"]]
