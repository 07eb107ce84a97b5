"""Adapters in two real engine processes that are killed, and new content under an old name."""

import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.adapters import Adapter
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import GenerateRequest
from tests.helpers.in_loop import until
from tests.helpers.live_fleet import LiveFleet, ended, fleet_runner
from tests.helpers.lora_folders import write_tiny_adapter

Work = Callable[[LiveFleet, Path], Coroutine[Any, Any, None]]
TEXT = "def fibonacci(number):\n" * 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Work], None]]:
    """Run work with engines that may read adapters of a folder, and that folder. One is given at the start."""
    folder = tmp_path_factory.mktemp("adapters")
    write_tiny_adapter(folder / "given", 1)
    options = AdapterConfig(lora=(f"given={folder / 'given'}",), lora_dir=str(folder), lora_max_rank=8)
    with fleet_runner(adapters=options) as found:
        yield lambda work: found(lambda fleet: work(fleet, folder))


def requests(fleet: LiveFleet, adapters: list[Adapter | None], max_tokens: int) -> list[GenerateRequest]:
    ids = fleet.tokenizer.encode(TEXT)
    made = []
    for number, adapter in enumerate(adapters):
        params = SequenceParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.7, seed=number)
        prompt = Prompt([*ids, number + 10], params, RequestMeta(adapter=adapter))
        made.append(GenerateRequest(request_id=f"r{number}", prompt=prompt))
    return made


def test_requests_keep_their_adapter_when_an_engine_is_killed(run: Callable[[Work], None]) -> None:
    async def work(fleet: LiveFleet, folder: Path) -> None:
        write_tiny_adapter(folder / "second", 2, rank=8)
        second = await fleet.engine.put_adapter("second", "second")
        asked = requests(fleet, [None, fleet.engine.adapters()["given"], second] * 2, max_tokens=30)
        alone = await fleet.run(asked)
        assert len({tuple(stream.ids[0]) for stream in alone[:3]}) == 3, "each has an answer of its own"
        streams = fleet.start(asked)
        await until(lambda: all(stream.tokens for stream in streams))
        os.kill(fleet.pids[0], signal.SIGKILL)
        await ended(streams)
        for stream, undisturbed in zip(streams, alone, strict=True):
            assert stream.error is None and stream.same(undisturbed)
        await fleet.until_up()
        names = [each.engine.adapters() for each in fleet.engine.endpoints if each.engine is not None]
        assert names == [fleet.engine.adapters()] * 2, "the new process knows the name"
        again = await fleet.run(asked)
        assert all(stream.same(undisturbed) for stream, undisturbed in zip(again, alone, strict=True))
        await fleet.engine.drop_adapter("second")

    run(work)


def test_new_content_under_an_old_name_finds_nothing_old(run: Callable[[Work], None]) -> None:
    async def work(fleet: LiveFleet, folder: Path) -> None:
        write_tiny_adapter(folder / "first", 3)
        write_tiny_adapter(folder / "other", 4)
        first = await fleet.engine.put_adapter("name", "first")
        for _ in range(2):  # the router sends later ones where the prefix is
            before = await fleet.run(requests(fleet, [first] * 4, max_tokens=8))
        assert all(stream.cached_tokens for stream in before)
        other = await fleet.engine.put_adapter("name", "other")
        assert other.digest != first.digest and fleet.engine.adapters()["name"] == other
        asked = requests(fleet, [other] * 4, max_tokens=8)
        after = [(await fleet.run([request]))[0] for request in asked]
        assert after[0].cached_tokens == 0, "no K/V of the old weights"
        assert all(stream.ids != old.ids for stream, old in zip(after, before, strict=True))
        again = await fleet.run(requests(fleet, [first] * 4, max_tokens=8))
        assert [stream.ids for stream in again] == [stream.ids for stream in before], "it is still there for who has it"
        await fleet.engine.drop_adapter("name")

    run(work)


def test_an_adapter_in_use_may_be_dropped(run: Callable[[Work], None]) -> None:
    async def work(fleet: LiveFleet, folder: Path) -> None:
        write_tiny_adapter(folder / "used", 5)
        used = await fleet.engine.put_adapter("used", "used")
        asked = requests(fleet, [used] * 4, max_tokens=20)
        streams = fleet.start(asked)
        await until(lambda: all(stream.tokens for stream in streams))
        await fleet.engine.drop_adapter("used")
        assert "used" not in fleet.engine.adapters()
        await ended(streams)
        assert all(stream.error is None and stream.tokens == 20 for stream in streams)

    run(work)


def test_unusable_folders_are_refused_by_name(run: Callable[[Work], None]) -> None:
    async def work(fleet: LiveFleet, folder: Path) -> None:
        write_tiny_adapter(folder / "wide", 6, rank=16)
        (folder / "empty").mkdir()
        (folder / "link").symlink_to("/etc")
        for path, problem in {"wide": "rank", "empty": "adapter_config.json", "link": "not allowed"}.items():
            with pytest.raises(InvalidRequestError, match=f"engine 0: .*{problem}"):
                await fleet.engine.put_adapter("x", path)
        assert set(fleet.engine.adapters()) == {"given"}
        write_tiny_adapter(folder / "gone", 7)
        gone = await fleet.engine.put_adapter("gone", "gone")
        before = gone._replace(digest=gone.digest[::-1])
        (stream,) = await fleet.run(requests(fleet, [before], max_tokens=4))
        assert "its files have changed" in str(stream.error)
        await fleet.engine.drop_adapter("gone")

    run(work)
