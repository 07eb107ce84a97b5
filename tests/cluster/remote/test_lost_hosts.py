"""Two hosts with an engine each, whose networks are cut, reset and stopped. One host's clock is an hour ahead.

Each stream has the text of an undisturbed run, once, or ends with a clear error. Afterwards both engines are empty.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roseinfer.cluster.directory import DynamicDirectory, EngineEntry
from roseinfer.cluster.directory_sync import start_from_directory
from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engine_server import EngineServer, RemoteProcessTransport
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.routed import RoutedEngine, RouterSetup
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.errors import EngineDeadError, EngineUnavailableError
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.api import EngineState, GenerateRequest
from roseinfer.engine.live import InflightLimit, LiveRequests
from tests.helpers.distant_engine import AHEAD_S
from tests.helpers.in_loop import until
from tests.helpers.live_fleet import Stream, ended
from tests.helpers.network import Wire, wire
from tests.helpers.remote import LOOPBACK, client, own_tls, priced_config, tiny_config

PATIENCE_S = 60.0
# Far enough apart on a slow machine to see the effect of one timeout before the other.
QUIET_S, LOST_S = 1.0, 4.0


class DistantTransport(RemoteProcessTransport):
    module = "tests.helpers.distant_engine"


class Hosts:
    """Server and network of each host, and a client of both."""

    def __init__(self, servers: list[EngineServer], wires: list[Wire], engine: RoutedEngine) -> None:
        self.servers = servers
        self.wires = wires
        self.engine = engine

    def state(self, number: int) -> EngineState:
        return self.engine.reports()[number].state

    def start(self, count: int, tokens: int) -> list[Stream]:
        streams = [Stream(ask(f"r{number}", number, tokens)) for number in range(count)]
        for stream in streams:
            self.engine.submit(stream.request, stream)
        return streams

    def number_in(self, number: int) -> int:
        client = self.engine.endpoints[number].engine
        return sum(live.engine is client for live in self.engine._requests.all())

    async def until_up(self) -> None:
        """Wait until both engines take requests and have sent a promise, which the router needs."""

        def up(number: int) -> bool:
            known = self.engine.endpoints[number].reader.promise(number) is not None
            return known and self.state(number) is EngineState.READY

        await until(lambda: up(0) and up(1))

    async def until_empty(self) -> None:
        """Wait until no engine has a request or holds a block, according to its own server."""

        def empty() -> bool:
            stats = [server.report().stats for server in self.servers]
            return not any(each.running or each.waiting or each.blocks_used for each in stats)

        await until(empty)
        assert self.engine.num_live == 0


def ask(name: str, number: int, tokens: int, **meta: Any) -> GenerateRequest:
    params = SequenceParams(max_tokens=tokens, ignore_eos=True, seed=number, temperature=1.0)
    prompt = [5 + number, *range(5, 45)]
    return GenerateRequest(request_id=name, prompt=Prompt(prompt, params, RequestMeta(**meta)))


async def hosts(stack: AsyncExitStack, folder: Path) -> Hosts:
    servers, wires = [], []
    for make in (DistantTransport, RemoteProcessTransport):
        server = EngineServer(priced_config(folder), LOOPBACK, own_tls(), make=make)
        stack.push_async_callback(server.close)
        servers.append(server)
        wires.append(await stack.enter_async_context(wire(await server.launch())))
    addresses = [each.address for each in wires]
    engine = await stack.enter_async_context(client(*addresses, engine_timeout=QUIET_S, stall_s=LOST_S))
    return Hosts(servers, wires, engine)


Work = Callable[[Hosts], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Work], None]]:
    """Return a function that runs work with the hosts in their event loop."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        made = runner.run(hosts(stack, tmp_path_factory.mktemp("hosts")))

        async def bounded(work: Work) -> None:
            async with asyncio.timeout(PATIENCE_S):
                await made.until_up()
                try:
                    await work(made)
                finally:
                    for each in made.wires:  # or all later tests would fail as well
                        each.mend()
                await made.until_empty()

        yield lambda work: runner.run(bounded(work))
        runner.run(stack.aclose())


async def check_whole(hosts: Hosts, streams: list[Stream]) -> None:
    """Assert that all streams have the text of an undisturbed run."""
    again = [Stream(replace(stream.request, request_id=f"again-{stream.request.request_id}")) for stream in streams]
    for stream in again:
        hosts.engine.submit(stream.request, stream)
    await ended(again)
    for stream, wanted in zip(streams, again, strict=True):
        assert stream.error is None and wanted.error is None
        assert stream.same(wanted) and stream.tokens == stream.request.prompt.params.max_tokens


async def begun(streams: list[Stream]) -> None:
    await until(lambda: all(stream.tokens >= 5 for stream in streams))


def test_requests_continue_elsewhere_when_the_network_is_cut(run: Callable[[Work], None]) -> None:
    """Late answers are dropped when the network is back, and the engine is used again."""

    async def work(hosts: Hosts) -> None:
        streams = hosts.start(8, 100)
        await begun(streams)
        assert hosts.number_in(0)
        hosts.wires[0].cut()
        await until(lambda: hosts.state(0) is not EngineState.READY)
        await until(lambda: hosts.number_in(0) == 0)
        await until(lambda: hosts.engine.endpoints[0].host_lost)
        assert not hosts.engine.endpoints[1].host_lost
        hosts.wires[0].mend()
        await ended(streams)
        await check_whole(hosts, streams)
        await hosts.until_up()
        assert hosts.servers[0].report().restarts == 0

    run(work)


def test_a_connection_is_closed_after_a_long_time_without_messages(run: Callable[[Work], None]) -> None:
    """Even though the engine still receives our messages."""

    async def work(hosts: Hosts) -> None:
        streams = hosts.start(8, 100)
        await begun(streams)
        connections = hosts.wires[0].connections
        hosts.wires[0].cut(there=False)
        await ended(streams)
        await until(lambda: hosts.engine.endpoints[0].engine is None)
        hosts.wires[0].mend()
        await hosts.until_up()
        assert hosts.wires[0].connections > connections
        await check_whole(hosts, streams)

    run(work)


def test_streams_survive_the_loss_of_a_host(run: Callable[[Work], None]) -> None:
    """The engine and its connections end, and nothing listens there for a while."""

    async def work(hosts: Hosts) -> None:
        streams = hosts.start(8, 200)
        await begun(streams)
        os.kill(distant_engine_pid(), signal.SIGKILL)
        await hosts.wires[0].close()
        await ended(streams)
        await check_whole(hosts, streams)
        assert hosts.state(0) is EngineState.DEAD
        await hosts.wires[0].open()

    run(work)


def test_with_all_hosts_gone_streams_end_with_a_clear_error(run: Callable[[Work], None]) -> None:
    async def work(hosts: Hosts) -> None:
        streams = hosts.start(4, 500)
        await begun(streams)
        for each in hosts.wires:
            await each.close()
        await ended(streams)
        assert {type(stream.error) for stream in streams} == {EngineDeadError}
        with pytest.raises(EngineUnavailableError):
            hosts.start(1, 5)
        for each in hosts.wires:
            await each.open()
        await hosts.until_up()

    run(work)


def test_a_clock_an_hour_ahead_changes_nothing(run: Callable[[Work], None]) -> None:
    """Objectives, deadlines, predictions and reported times use the client's clock."""

    async def work(hosts: Hosts) -> None:
        promises = [endpoint.reader for endpoint in hosts.engine.endpoints]
        await until(lambda: all(reader.promise(number) is not None for number, reader in enumerate(promises)))
        now_s = asyncio.get_running_loop().time()
        for number, reader in enumerate(promises):
            promise = reader.promise(number)
            assert promise is not None and now_s - 60 < promise.at_s <= now_s + 0.1
        slo = Slo(ttft_s=PATIENCE_S, tpot_s=1.0, e2e_s=PATIENCE_S)  # the client is yet to start
        request = ask("timed", 3, 20, slo=slo, arrival_s=now_s, deadline_s=now_s + PATIENCE_S)
        async with client(hosts.wires[0].address) as alone:  # with the distant one
            chunks = [chunk async for chunk in alone.generate(request)]
        times = chunks[-1].times
        assert times is not None and chunks[-1].rejection is None and chunks[-1].num_output_tokens == 20
        assert now_s <= times.arrival_s + 0.01 < times.first_token_s <= times.finished_s < now_s + AHEAD_S / 2
        why = chunks[0].why
        assert why is not None and all(0 <= seconds < 60 for _, seconds in why.waited)

    run(work)


def test_engines_come_and_go_with_a_directory(run: Callable[[Work], None]) -> None:
    """A client begins with one engine. The directory adds another one, and then retires the first."""

    async def work(hosts: Hosts) -> None:
        first, other = [
            EngineEntry(str(each.address), incarnation="1", number=7 + n) for n, each in enumerate(hosts.wires)
        ]
        directory, engines = DynamicDirectory([first]), RemoteEngines(own_tls(), quiet_s=QUIET_S, lost_s=LOST_S)
        requests = LiveRequests(load_tokenizer(tiny_config().model), None, InflightLimit(), "told-")

        def way(entry: EngineEntry, number: int) -> Connector:
            return engines.connector(number, HostPort.parse(entry.address, "engines"))

        engine = await start_from_directory(directory, way, requests, RouterSetup(), drain_s=0.2)
        streams = [Stream(ask(f"r{number}", number, 250)) for number in range(4)]
        for stream in streams:
            engine.submit(stream.request, stream)
        await begun(streams)
        directory.set_entries([first, other])
        await until(lambda: [report.state for report in engine.reports()] == [EngineState.READY] * 2)
        directory.set_entries([first._replace(retiring=True), other])
        await until(lambda: [report.engine for report in engine.reports()] == [8])
        await ended(streams)
        assert engine.num_live == 0
        await engine.close()
        engines.close()
        await check_whole(hosts, streams)

    run(work)


def distant_engine_pid() -> int:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    [pid] = [pid for pid in children if b"distant_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(pid)
