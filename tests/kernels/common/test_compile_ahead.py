"""Kernels that are compiled in parallel, by forks of the process that needs them."""

import gc
import os
import select
import time
from pathlib import Path

import pytest

from roseinfer.kernels.common import compile_ahead
from roseinfer.kernels.common.compile_ahead import ForkExecutor, compiling
from roseinfer.kernels.common.triton_support import HAS_TRITON


def test_forks_run_beside_each_other_and_leave_only_files(tmp_path: Path) -> None:
    here: list[int] = []

    def call(number: int) -> int:
        file = tmp_path / str(number)
        if file.exists():
            here.append(number)
            return int(file.read_text())
        while len(list(tmp_path.iterdir())) < number:
            time.sleep(0.001)  # for the other one
        file.write_text(str(os.getpid()))
        here.append(-1)
        return -1

    forks = ForkExecutor(2)
    futures = [forks.submit(lambda number=number: call(number)) for number in (1, 0)]
    forks.finish()
    found = {future.result() for future in futures}
    assert here == [1, 0] and len(found) == 2 and os.getpid() not in found


def test_a_fork_does_not_free_its_parents_garbage(tmp_path: Path) -> None:
    """Tensors of a GPU are freed by the process that made them: a fork that does so ends."""

    class Circle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    def allocate() -> None:
        kept = [[] for _ in range(200_000)]
        kept.clear()

    gc.collect()
    forks = ForkExecutor(2)
    Circle()
    forks.submit(allocate)
    forks.finish()
    gc.collect()
    assert gc.isenabled() and [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_a_fork_that_fails_or_hangs_leaves_it_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "FORK_TIMEOUT_S", 0.2)
    mine = os.getpid()

    def fails() -> str:
        if os.getpid() != mine:
            os._exit(3)
        return "here"

    def hangs() -> str:
        if os.getpid() != mine:
            time.sleep(60)
        return "here, too"

    def wrong() -> str:
        raise ValueError("whoever does it")

    forks = ForkExecutor(3)
    first, second, third = map(forks.submit, (fails, hangs, wrong))
    forks.finish()
    assert (first.result(), second.result()) == ("here", "here, too")
    with pytest.raises(ValueError, match="whoever does it"):
        third.result()


def test_a_fork_holds_nothing_open_that_its_parent_has(tmp_path: Path) -> None:
    """Peers of a pipe, and users of a port, depend on the parent alone."""
    mine, over = os.getpid(), tmp_path / "over"
    here, there = os.pipe()

    def works() -> None:
        while os.getpid() != mine and not over.exists():
            time.sleep(0.001)

    forks = ForkExecutor(1)
    forks.submit(works)
    os.close(there)
    ended, _, _ = select.select([here], [], [], 20.0)
    over.touch()
    forks.finish()
    os.close(here)
    assert ended, "the fork had the other end"


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("late", [False, True])
def test_an_interruption_ends_the_forks_and_compiles_nothing_here(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the launches or, `late`, during the wait for the forks."""
    from triton.runtime._async_compile import active_mode

    mine, here = os.getpid(), []
    forks: list[int] = []

    def interrupted(self: ForkExecutor) -> None:
        raise KeyboardInterrupt

    def compiles() -> None:
        if os.getpid() != mine:
            time.sleep(60)
        here.append(1)

    def launch_one() -> None:
        with compiling(2) as ahead:
            assert ahead
            mode = active_mode.get()
            mode.submit("kernel", compiles, lambda kernel: None)
            forks.extend(mode.executor._running)
            if not late:
                raise KeyboardInterrupt

    if late:
        monkeypatch.setattr(ForkExecutor, "_reap", interrupted)
    monkeypatch.setattr(compile_ahead, "FORK_TIMEOUT_S", 0.5)
    with pytest.raises(KeyboardInterrupt):
        launch_one()
    assert active_mode.get() is None and not here and len(forks) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(forks[0], 0)


def test_one_core_compiles_as_ever() -> None:
    with compiling(1) as ahead:
        assert not ahead
