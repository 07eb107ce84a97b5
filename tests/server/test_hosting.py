"""Tasks of each process of a server."""

import asyncio
import contextlib
import gc
import json
import os
import pty
import select
import shlex
import signal
import socket
import sys
from pathlib import Path

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.server.hosting import (
    MAX_AUTO_WORKERS,
    MAX_YOUNG_OBJECTS,
    Signals,
    greeting,
    new_event_loop,
    settle_garbage_collector,
    unless_stopped,
    worker_count,
)
from tests.server.live import LiveServer


def test_the_event_loop_is_uvloops_where_there_is_one() -> None:
    uvloop = pytest.importorskip("uvloop")
    loop = new_event_loop()
    assert isinstance(loop, uvloop.Loop)
    loop.close()


def test_what_is_there_after_the_start_is_not_looked_through_again() -> None:
    thresholds, before = gc.get_threshold(), gc.get_freeze_count()
    try:
        there = [[] for _ in range(10_000)]
        settle_garbage_collector()
        assert gc.get_freeze_count() >= before + len(there) and gc.isenabled()
        assert gc.get_threshold()[0] == MAX_YOUNG_OBJECTS
    finally:
        gc.set_threshold(*thresholds)


def test_how_many_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_count(7, "cpu") == 7, "what was asked for"
    for cores, device, workers in ((1, "auto", 1), (7, "cuda", 1), (8, "auto", 2), (16, "cuda", 4), (128, "auto", 4)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert worker_count(None, device) == workers <= MAX_AUTO_WORKERS
        assert worker_count(None, "cpu") == 1


@pytest.mark.parametrize("chats", [True, False])
def test_the_first_line_suggests_a_request_that_the_server_accepts(shared: LiveServer, chats: bool) -> None:
    config = ServerConfig(served_model_name=("fake", "it's"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        words = greeting(config, ["fake"], listener, shared.engine.info, chats=chats)
    first, command = words.splitlines()
    assert first.startswith(f"fake is served on {url};")
    curl, address, *_, body = shlex.split(command)
    path = "/v1/chat/completions" if chats else "/v1/completions"
    assert (curl, address) == ("curl", url + path)
    assert shared.post(path, json.loads(body)).status_code == 200


HANGS_UP = """
import asyncio, os, sys
from roseinfer.server.hosting import Signals

async def main():
    signals = Signals(lambda: os.write(9, b"reload "))
    signals.install()
    os.write(9, b"up ")
    await signals.first.wait()
    os.write(9, b"end ")

asyncio.run(main())
"""
JOB = f"{sys.executable} -c '{HANGS_UP}'"


@pytest.mark.parametrize(
    ("command", "came"),
    [
        (f"{JOB} < /dev/null & wait", "end"),
        (f"nohup {JOB} < /dev/null > /dev/null 2>&1 & wait", "reload"),
    ],
    ids=["job of a script", "nohup"],
)
def test_a_terminal_that_is_closed_ends_who_belongs_to_it(command: str, came: str) -> None:
    """One that outlives it takes the next SIGHUP for what it says."""
    ours, theirs = os.pipe()
    shell, terminal = pty.fork()
    if shell == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who runs the tests may have been told to ignore it
        os.dup2(theirs, 9)
        os.execvp("sh", ["sh", "-c", command])
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as heard:
        assert heard.read(100) == b"up "
        job = _child(shell)
        os.close(terminal)  # the kernel sends SIGHUP to all that runs in front
        os.waitpid(shell, 0)
        if came == "reload":
            assert not select.select([heard], [], [], 0.2)[0], "nohup is to keep this from it"
            os.kill(job, signal.SIGHUP)
        assert heard.read(100) == f"{came} ".encode()
    with contextlib.suppress(ProcessLookupError):
        os.kill(job, signal.SIGKILL)


def _child(shell: int) -> int:
    return int(Path(f"/proc/{shell}/task/{shell}/children").read_text())


def test_a_hangup_without_a_terminal_restarts_engines() -> None:
    async def hang_up() -> list[str]:
        heard: list[str] = []
        signals = Signals(lambda: heard.append("reload"))
        signals.install()
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            while not heard and not signals.first.is_set():
                await asyncio.sleep(0.001)
        return heard + ["end"] * signals.first.is_set()

    assert asyncio.run(hang_up()) == ["reload"]


def test_a_hangup_while_it_ends_restarts_nothing() -> None:
    async def end() -> list[str]:
        heard: list[str] = []
        signals = Signals(lambda: heard.append("reload"))
        signals.install()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            await signals.second.wait()
        return heard

    assert asyncio.run(end()) == []


def test_work_that_is_not_stopped_has_its_result_or_error() -> None:
    async def work(failure: Exception | None) -> str:
        await asyncio.sleep(0)
        if failure is not None:
            raise failure
        return "done"

    async def run(failure: Exception | None) -> str | None:
        return await unless_stopped(work(failure), asyncio.Event().wait(), asyncio.Event().wait())

    assert asyncio.run(run(None)) == "done"
    with pytest.raises(OSError, match="broken"):
        asyncio.run(run(OSError("broken")))


@pytest.mark.parametrize("cancelled", [False, True])
def test_work_has_ended_when_it_is_stopped_or_nobody_waits_for_it(cancelled: bool) -> None:
    async def work(events: list[str]) -> None:
        events.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("ended")

    async def run() -> None:
        events, stop = list[str](), asyncio.Event()
        waits = asyncio.create_task(unless_stopped(work(events), stop.wait()))
        while not events:
            await asyncio.sleep(0)
        if cancelled:
            waits.cancel()
        else:
            stop.set()
        await asyncio.wait({waits})
        assert events == ["began", "ended"]
        assert waits.cancelled() if cancelled else waits.result() is None

    asyncio.run(run())
