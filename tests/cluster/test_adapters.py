"""Adapters of several engines and several clients: one set of names, whoever restarts."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from roseinfer.cluster.routed import RoutedEngine
from roseinfer.cluster.routing import new_ask, prompt_block_keys
from roseinfer.core.adapters import Adapter, adapter_key
from roseinfer.core.errors import EngineClosedError, EngineUnavailableError, InvalidRequestError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.adapter_names import AdapterNames
from roseinfer.engine.api import EngineState, GenerateRequest
from tests.helpers.adapter_files import adapter, files_below, registry
from tests.helpers.in_loop import run, until
from tests.helpers.routed_fleet import Fleet, Reader, with_fleet
from tests.helpers.socket_engine import SocketEngine, client_of


class Site:
    """Engines that share a folder of adapters, and their clients. `files[i]`: what engine i finds in it."""

    def __init__(self, folder: Path, engines: int, **contents: str) -> None:
        self._folder = folder
        self.files = [files_below(folder, **contents) for _ in range(engines)]
        self.engines = [self._engine(number) for number in range(engines)]
        self.clients: list[RoutedEngine] = []

    def _engine(self, number: int, *at_start: Adapter) -> SocketEngine:
        adapters = registry(self._folder, self.files[number])
        adapters.names = AdapterNames(at_start)
        return SocketEngine(self._folder / f"engine-{number}", adapters)

    async def client(self) -> RoutedEngine:
        client = await client_of(self.engines, f"c{len(self.clients)}-")
        self.clients.append(client)
        await self.all_connected(client)
        return client

    async def all_connected(self, client: RoutedEngine) -> None:
        await until(lambda: all(endpoint.engine is not None for endpoint in client.endpoints))

    def restart(self, number: int, *at_start: Adapter) -> None:
        self.engines[number].die()
        self.engines[number] = self._engine(number, *at_start)

    def known(self, client: RoutedEngine) -> list[dict[str, str]]:
        """Return the names of each engine, with digests, as this client knows them."""
        return [
            {name: each.digest for name, each in endpoint.engine.adapters().items()}
            for endpoint in client.endpoints
            if endpoint.engine is not None
        ]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for engine in self.engines:
            engine.die()


def with_site(engines: int, **contents: str) -> Callable[[Callable[[Site], Awaitable[None]]], Callable[[Path], None]]:
    def decorate(work: Callable[[Site], Awaitable[None]]) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            async def main() -> None:
                site = Site(tmp_path, engines, **contents)
                try:
                    await work(site)
                finally:
                    await site.close()

            run(main())

        return test

    return decorate


def digest(content: str) -> str:
    return adapter(content=content).digest


async def ask(client: RoutedEngine, name: str, of: Adapter | None) -> Reader:
    """Return the reader of a request that has ended."""
    params = SequenceParams(max_tokens=4, seed=1)
    request = GenerateRequest(request_id=name, prompt=Prompt([5, 9, 2, 7, 11], params, RequestMeta(adapter=of)))
    reader = Reader()
    client.submit(request, reader)
    await until(lambda: bool(reader.ends or reader.errors))
    return reader


@with_site(2, a="one", b="two")
async def test_every_client_learns_a_name_and_its_end(site: Site) -> None:
    first, second = await site.client(), await site.client()
    put = await first.put_adapter("x", "a")
    assert put == Adapter("x", digest("one"), "a", put.rank, put.num_bytes)
    assert first.adapters() == {"x": put}
    await until(lambda: second.adapters() == {"x": put})
    assert [files.asked for files in site.files] == [[("x", str(site._folder / "a"))]] * 2
    late = await site.client()
    await until(lambda: late.adapters() == {"x": put})
    assert await second.drop_adapter("x") == put
    assert not second.adapters()
    await until(lambda: not first.adapters() and not late.adapters())
    with pytest.raises(InvalidRequestError, match="no LoRA adapter is named 'x'"):
        await second.drop_adapter("x")


@with_site(2, a="one", b="two")
async def test_other_content_replaces_a_name_on_all_engines(site: Site) -> None:
    first, second = await site.client(), await site.client()
    await first.put_adapter("x", "a")
    await until(lambda: "x" in second.adapters())
    await second.put_adapter("x", "b")
    await until(lambda: site.known(first) == site.known(second) == [{"x": digest("two")}] * 2)
    assert first.adapters()["x"].digest == digest("two")


@with_site(2, a="one")
async def test_an_engine_that_cannot_load_is_named_and_no_name_changes(site: Site) -> None:
    client = await site.client()
    site.files[1].contents.clear()
    with pytest.raises(InvalidRequestError, match=r"engine 1: no adapter in 'a'") as raised:
        await client.put_adapter("x", "a")
    assert raised.value.code == "adapter_not_loaded"
    for path in ("/etc", "../a"):
        with pytest.raises(InvalidRequestError, match=r"engine 0: adapter path '.*' is not allowed"):
            await client.put_adapter("x", path)
    with pytest.raises(InvalidRequestError, match="invalid adapter name"):
        await client.put_adapter("x\n", "a")
    assert not client.adapters() and site.known(client) == [{}, {}]


@with_site(2, a="one")
async def test_other_content_on_one_engine_is_refused(site: Site) -> None:
    client = await site.client()
    site.files[1].contents = dict.fromkeys(site.files[1].contents, "other")
    with pytest.raises(InvalidRequestError, match="engine 1: other content at path 'a' than engine 0"):
        await client.put_adapter("x", "a")
    assert site.known(client) == [{}, {}]


@with_site(2, a="one", b="two")
async def test_a_restarted_engine_gets_the_names_again(site: Site) -> None:
    client = await site.client()
    put = await client.put_adapter("x", "a")
    site.restart(0)
    await until(lambda: site.known(client) == [{"x": put.digest}] * 2)
    other = await client_of(site.engines[:1], "other-")
    site.clients.append(other)
    await until(lambda: other.adapters() == {"x": put})


@with_site(1)
async def test_a_restart_brings_no_dropped_or_replaced_name_back(site: Site) -> None:
    site.restart(0, adapter("x", "one"), adapter("y", "two"))
    client = await site.client()
    assert set(client.adapters()) == {"x", "y"}
    await client.drop_adapter("x")
    site.files[0].contents[str(site._folder / "new")] = "new"
    await client.put_adapter("y", "new")
    site.restart(0, adapter("x", "one"), adapter("y", "two"))
    await until(lambda: site.known(client) == [{"y": digest("new")}])
    assert set(client.adapters()) == {"y"}


@with_site(2, a="one")
async def test_an_engine_that_dies_while_it_loads_gets_the_name_when_it_is_back(site: Site) -> None:
    client = await site.client()
    site.files[0].slow = True
    putting = asyncio.create_task(client.put_adapter("x", "a"))
    await until(lambda: bool(site.files[0].asked))
    site.engines[0].die()
    put = await putting
    site.engines[0] = site._engine(0)
    await until(lambda: site.known(client) == [{"x": put.digest}] * 2)


@with_site(2, a="one", b="two", c="three")
async def test_random_changes_end_with_the_same_names_everywhere(site: Site) -> None:
    rng, clients = Random(7), [await site.client(), await site.client()]

    async def change(client: RoutedEngine) -> None:
        name = rng.choice("xyz")
        with contextlib.suppress(InvalidRequestError, EngineUnavailableError):  # an unknown name, no engine
            if rng.random() < 0.3:
                await client.drop_adapter(name)
            else:
                await client.put_adapter(name, rng.choice("abc"))

    for _ in range(15):
        changes = [asyncio.create_task(change(rng.choice(clients))) for _ in range(3)]
        if rng.random() < 0.4:
            site.restart(rng.randrange(2), adapter("x", "at the start"))
        await asyncio.gather(*changes)
    for client in clients:
        await site.all_connected(client)
        await client.put_adapter("last", "a")

    def agree() -> bool:
        names = {name: each.digest for name, each in clients[0].adapters().items()}
        return all(site.known(client) == [names] * 2 for client in clients)

    await until(agree)
    assert "last" in clients[0].adapters() and clients[0].adapters() == clients[1].adapters()


@with_site(1, a="one")
async def test_without_an_engine_nothing_is_loaded(site: Site) -> None:
    client = await site.client()
    site.engines[0].die()
    await until(lambda: not client.health().alive)
    with pytest.raises(EngineUnavailableError):
        await client.put_adapter("x", "a")
    await client.close()
    with pytest.raises(EngineClosedError):
        await client.put_adapter("x", "a")
    with pytest.raises(EngineClosedError):
        await client.drop_adapter("x")


@with_site(1, a="one")
async def test_closing_ends_a_load_that_is_waited_for(site: Site) -> None:
    client = await site.client()
    site.files[0].slow = True
    putting = asyncio.create_task(client.put_adapter("x", "a"))
    await until(lambda: bool(site.files[0].asked))
    await client.close()
    with pytest.raises((EngineClosedError, EngineUnavailableError)):
        await putting


def test_an_engine_without_adapters_refuses_them(tmp_path: Path) -> None:
    async def main() -> None:
        engine = SocketEngine(tmp_path / "engine", None)
        client = await client_of([engine], "c")
        with pytest.raises(InvalidRequestError, match="serves no LoRA adapters: start it with --lora or --lora-dir"):
            await client.put_adapter("x", "a")
        reader = await ask(client, "r", adapter("x"))
        assert isinstance(reader.errors[0], InvalidRequestError) and "no LoRA adapters" in str(reader.errors[0])
        assert (await ask(client, "s", None)).ends == [FinishReason.LENGTH], "it still serves its model"
        await client.close()
        engine.die()

    run(main())


def test_a_request_takes_its_adapter_to_another_engine() -> None:
    async def work(fleet: Fleet) -> None:
        wanted = adapter("x", "one")
        waiting = fleet.submit(meta=RequestMeta(adapter=wanted))
        begun = fleet.submit(meta=RequestMeta(adapter=wanted))
        fleet.models[1].step()
        assert [fleet.where(each) for each in (waiting, begun)] == [0, 1]
        fleet.die(1)
        assert fleet.where(begun) == 0 and fleet.models[0].adds[-1].outputs is not None, "it continues there"
        await fleet.restart(1)
        fleet.stand(0, EngineState.DRAINING)
        fleet.routed.tick()
        assert fleet.where(waiting) == 1
        adds = [add for model in fleet.models for add in model.adds]
        assert [add.prompt.meta.adapter for add in adds] == [wanted] * 3
        fleet.finish()
        waiting.check_whole()
        begun.check_whole()

    asyncio.run(with_fleet(work))


def test_prompts_of_other_weights_share_no_key() -> None:
    def keys(of: Adapter | None, salt: str = "") -> bytes:
        prompt = Prompt(list(range(64)), SequenceParams(max_tokens=1), RequestMeta(cache_salt=salt, adapter=of))
        return prompt_block_keys(GenerateRequest(request_id="r", prompt=prompt), 16)

    one, renamed, other = adapter("x", "one"), adapter("y", "one"), adapter("x", "other")
    assert keys(one) == keys(renamed), "the content counts"
    distinct = [keys(None), keys(one), keys(other), keys(None, "x"), keys(one, "x"), keys(None, one.digest)]
    parts = [{every[i : i + 32] for i in range(0, len(every), 32)} for every in distinct]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 4 * len(distinct)


def test_the_router_learns_of_the_adapter() -> None:
    wanted = adapter("x", "one")
    meta = RequestMeta(adapter=wanted)
    request = GenerateRequest(request_id="r", prompt=Prompt([1], SequenceParams(max_tokens=1), meta))
    ask = new_ask(request, b"", 16, 0.0)
    assert (ask.adapter, ask.adapter_bytes) == (adapter_key(wanted.digest), wanted.num_bytes)
