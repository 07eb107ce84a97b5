"""Children end when they are told to, when they hang, and with their parent; nothing is left of them."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roseinfer.core.errors import ConfigError, EngineDeadError, RequestTooLongError
from roseinfer.processes import launch as module
from roseinfer.processes.child import ErrorReport, LogSettings
from roseinfer.processes.frames import read_frame
from roseinfer.processes.launch import ChildProcess, describe_exit, launch
from roseinfer.processes.supervise import finish
from tests.processes.children import MODULE, Boot

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
try:
    import uvloop

    LOOPS.append(uvloop.new_event_loop)
except ImportError:
    pass
TIMEOUT_S = 30.0


@pytest.fixture(params=LOOPS)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def started(task: str, folder: Path, text: str = "") -> ChildProcess:
    return launch(MODULE, Boot(str(folder), LogSettings.current(), text), arguments=[task])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def exists(pid: int) -> bool:
    """Return False also for a zombie whose parent has ended."""
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def test_a_child_gets_its_boot_struct_and_ends_with_its_standard_input(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def main() -> None:
        files = len(os.listdir("/dev/fd"))
        child = started("until-eof", tmp_path, "grüße " * 1000)
        while not (tmp_path / "up").exists():
            assert child.exit_code is None
            await asyncio.sleep(0.01)
        assert (tmp_path / "up").read_text() == f"{child.pid} {'grüße ' * 1000}"
        waiting = [asyncio.create_task(child.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        child.close()
        assert await asyncio.gather(*waiting) == [0, 0] and child.exit_code == 0
        assert len(os.listdir("/dev/fd")) <= files

    runner.run(main())


def test_where_there_is_no_pidfd_the_end_is_noticed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    child = started("crash", tmp_path)
    assert asyncio.run(child.wait()) == -signal.SIGKILL
    child.close()


def test_a_child_that_ends_before_it_reads_its_boot_struct_is_reported_by_its_exit_code(
    runner: asyncio.Runner, tmp_path: Path
) -> None:
    child = launch(MODULE, arguments=["exit"])
    assert child.wait_in_thread(TIMEOUT_S) == 3
    child.send_boot(Boot("", LogSettings.current()))
    assert runner.run(child.wait()) == 3
    child.close()


def test_a_child_whose_parent_sends_no_boot_struct_exits_quietly() -> None:
    child = launch(MODULE, arguments=["hang"])
    child.close()
    assert child.wait_in_thread(TIMEOUT_S) == 1


def test_a_child_whose_parent_is_killed_while_it_sends_the_boot_struct_exits_quietly() -> None:
    command = [sys.executable, "-m", MODULE, "hang"]
    child = subprocess.run(command, input=b'{"folder":"/tm', stderr=subprocess.PIPE, timeout=TIMEOUT_S)
    assert (child.returncode, child.stderr) == (1, b"")


def test_a_program_that_cannot_be_started_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError):
        launch(MODULE)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_that_does_not_end_is_killed(tmp_path: Path, runner: asyncio.Runner, stopped: bool) -> None:
    async def main() -> None:
        child = started("hang", tmp_path)
        while not (tmp_path / "up").exists():
            await asyncio.sleep(0.01)
        if stopped:
            os.kill(child.pid, signal.SIGSTOP)
        os.kill(child.pid, signal.SIGTERM)  # as service managers do
        assert await child.stop(0.1) == -signal.SIGKILL
        assert await child.stop(0.0) == -signal.SIGKILL, "again"
        child.kill()
        child.close()
        child.close()

    runner.run(main())


def test_a_thread_can_stop_a_child(tmp_path: Path) -> None:
    child = started("hang", tmp_path)
    assert child.wait_in_thread(0.01) is None
    assert child.stop_in_thread(0.01) == -signal.SIGKILL
    child.close()


def test_a_child_is_reaped_even_if_its_parents_task_is_cancelled_twice(tmp_path: Path, runner: asyncio.Runner) -> None:
    async def main() -> None:
        child = started("hang", tmp_path)
        stopping = asyncio.create_task(finish(child.stop(0.2)))
        for _ in range(2):
            await asyncio.sleep(0.02)
            stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert child.exit_code == -signal.SIGKILL
        child.close()

    runner.run(main())


def test_many_children_leave_no_thread_descriptor_or_zombie(tmp_path: Path) -> None:
    async def main() -> None:
        gc.collect()  # what other tests have left
        threads, files = threading.active_count(), len(os.listdir("/dev/fd"))
        for _ in range(3):
            children = [launch(MODULE, arguments=["exit"]) for _ in range(2)]
            assert await asyncio.gather(*(child.wait() for child in children)) == [3, 3]
            for child in children:
                child.close()
            assert not any(Path(f"/proc/{child.pid}").exists() for child in children), "not even a zombie"
        gc.collect()
        assert threading.active_count() <= threads and len(os.listdir("/dev/fd")) <= files

    asyncio.run(main())


PARENT = """
import sys, time
from roseinfer.processes.child import LogSettings
from roseinfer.processes.launch import launch
from tests.processes.children import MODULE, Boot
child = launch(MODULE, Boot(sys.argv[2], LogSettings.current()), arguments=[sys.argv[1]])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("task", ["hang", "die-with-parent", "until-eof"])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, task: str) -> None:
    if task == "die-with-parent" and sys.platform != "linux":
        pytest.skip("needs prctl")
    root = Path(module.__file__).parents[2]
    command = [sys.executable, "-c", PARENT, task, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for((tmp_path / "up").exists)
        if task == "die-with-parent":
            os.kill(pid, signal.SIGSTOP)  # not even this keeps it
        parent.kill()
        parent.wait()
    wait_for(lambda: not exists(pid))
    assert (tmp_path / "orphaned").exists() == (task == "hang")


def test_a_new_session_is_out_of_the_terminals_reach() -> None:
    for new_session in (False, True):
        child = launch(MODULE, arguments=["hang"], new_session=new_session)
        assert (os.getpgid(child.pid) == os.getpgid(0)) != new_session
        child.stop_in_thread(0.0)
        child.close()


def test_a_child_sends_frames_on_its_standard_output() -> None:
    child = launch(MODULE, arguments=["frames"], read_stdout=True)
    assert read_frame(child.stdout.read) == b"result"
    assert child.stdout.read() == b"" and child.wait_in_thread(TIMEOUT_S) == 0
    child.close()


def test_exit_codes_are_described_with_the_likely_cause() -> None:
    assert describe_exit(3) == "ended with code 3"
    assert describe_exit(-9) == "ended with code -9 (killed; the system does this when memory runs out)"
    assert describe_exit(-9, by_us=True) == "ended with code -9"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_errors_arrive_as_what_they_are() -> None:
    typed = ErrorReport.of(ConfigError("max_model_len is too large \ud800")).as_error()
    assert isinstance(typed, ConfigError) and str(typed) == "max_model_len is too large ?"
    assert isinstance(ErrorReport.of(EngineDeadError("x")).as_error(), EngineDeadError)
    unexpected = ErrorReport.of(ValueError("x" * 1000))
    assert unexpected.kind == "" and len(unexpected.message) == 500 and unexpected.as_error() is None
    assert ErrorReport.of(Unprintable()).message == "Unprintable: its message cannot be shown"
    for kind in ("OSError", "annotations", "RequestTooLongError"):
        error = ErrorReport(kind, "x").as_error()
        assert error is None or isinstance(error, RequestTooLongError)
