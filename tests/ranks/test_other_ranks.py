"""Processes of other ranks: rank 0 raises their failures, and none is left, however it ends."""

import gc
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.errors import ConfigError, EngineDeadError, EngineUnavailableError, ResourceError, RoseinferError
from roseinfer.core.runner import Runner
from roseinfer.engine.options import make_engine_config
from roseinfer.parallel.group import SingleRank
from roseinfer.processes.child import ErrorReport
from roseinfer.processes.launch import ChildProcess, launch
from roseinfer.ranks import leader, other_ranks
from roseinfer.ranks.boot import rank_error
from roseinfer.ranks.build import build_leader
from roseinfer.ranks.leader import end_ranks, exit_on_loss
from roseinfer.ranks.other_ranks import OtherRanks, RankHost
from tests.helpers.acting_rank import MODULE
from tests.helpers.process_table import alive
from tests.server.real_server import until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="inherits descriptors")


@pytest.fixture
def ranks() -> Iterator[OtherRanks]:
    made = OtherRanks(3, module=MODULE)
    made.start()
    pids = made.pids
    yield made
    made.close()
    made.close()  # may be called again
    assert not any(map(alive, pids))


def boot(ranks: OtherRanks, act: str) -> None:
    ranks.boot(make_engine_config(model=act), Path("model"))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigError("too long"), ConfigError, "^too long$"),
        (EngineDeadError("timeout"), EngineDeadError, "^rank 1 failed: timeout$"),
        (KeyError("x"), EngineDeadError, "^rank 1 failed: KeyError: 'x'$"),
        (EngineUnavailableError("later", 1.0), EngineDeadError, "^rank 1 failed: later$"),
    ],
)
def test_errors_of_a_rank_keep_their_type_or_name_the_rank(
    error: Exception, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        raise rank_error(1, ErrorReport.of(error))


def test_ranks_get_all_calls_until_they_are_closed(ranks: OtherRanks) -> None:
    boot(ranks, "reads")
    ranks.await_ready_to_join()
    ranks.mark_started()
    for _ in range(20):
        ranks.send(bytes(2**20))  # more than fits into the ring at once
    ranks.close()
    assert ranks.failure is None


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        ("fails", ConfigError, "^max_model_len is too much for this rank$"),
        ("breaks", EngineDeadError, "^rank [12] failed: RuntimeError: no more$"),
        ("lingers", EngineDeadError, "^rank [12] failed: RuntimeError: no more$"),
        ("garbles", EngineDeadError, r"^rank [12] failed: invalid status message: b'what\?'$"),
    ],
)
def test_a_rank_that_fails_to_start_raises_its_error(
    ranks: OtherRanks, act: str, kind: type[Exception], message: str
) -> None:
    boot(ranks, act)
    with pytest.raises(kind, match=message):
        ranks.await_ready_to_join()


def test_a_rank_that_dies_before_it_is_booted(ranks: OtherRanks) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    until(lambda: ranks.failure is not None)
    boot(ranks, "reads")
    with pytest.raises(EngineDeadError, match="the process of rank 2 ended with code -9"):
        ranks.await_ready_to_join()


def test_ranks_that_die_before_they_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_dead(*args: Any, **options: Any) -> ChildProcess:
        child = launch(*args, **options)
        child.stop_in_thread(0.0)
        return child

    monkeypatch.setattr(other_ranks, "launch", launch_dead)
    ranks = OtherRanks(2, module=MODULE)
    ranks.start()
    until(lambda: ranks.failure is not None)
    ranks.close()


def test_a_rank_that_dies_while_all_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that makes the group ends, and the failure is raised but not logged."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = OtherRanks(2, module=MODULE)
    ranks.start()
    with pytest.raises(EngineDeadError, match="the process of rank 1 ended with code -9"):
        build_leader(make_engine_config(model="dies", device="cpu", tensor_parallel_size=2), Path("model"), ranks)
    until(lambda: not any(thread.name == "roseinfer-join" for thread in threading.enumerate()))
    assert not list(tmp_path.iterdir()) and not caplog.text


def test_closing_does_not_wait_for_ranks_that_load(monkeypatch: pytest.MonkeyPatch, ranks: OtherRanks) -> None:
    monkeypatch.setattr(other_ranks, "CLOSE_TIMEOUT_S", 3600.0)
    boot(ranks, "stays")
    ranks.await_ready_to_join()
    ranks.close()


def test_without_a_ring_no_descriptor_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(other_ranks, "RingWriter", no_memory)
    gc.collect()  # what other tests have left
    before = os.listdir("/dev/fd")
    with pytest.raises(ResourceError, match="Cannot allocate memory"):
        OtherRanks(2)
    assert os.listdir("/dev/fd") == before


def test_when_a_rank_dies_the_others_are_ended_and_calls_raise_its_failure(
    ranks: OtherRanks, caplog: pytest.LogCaptureFixture
) -> None:
    lost = threading.Event()
    ranks.on_loss = lost.set
    boot(ranks, "reads")
    ranks.await_ready_to_join()
    ranks.mark_started()
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert lost.wait(60)
    assert caplog.messages == [
        "the process of rank 1 ended with code -9 (killed; the system does this when memory runs out)"
    ]
    until(lambda: not any(map(alive, ranks.pids)))
    with pytest.raises(EngineDeadError, match="rank 1"):
        ranks.send(b"anything")
    for error in (RuntimeError("connection closed"), EngineDeadError("timed out")):
        assert ranks.cause_of(error) is ranks.failure
    assert ranks.cause_of(ours := ConfigError("ours")) is ours


def test_an_error_that_no_rank_caused_is_kept(ranks: OtherRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_ranks, "REPORT_TIMEOUT_S", 0.0)
    assert ranks.cause_of(error := RuntimeError("ours")) is error


def test_a_rank_that_does_not_respond_is_killed(monkeypatch: pytest.MonkeyPatch, ranks: OtherRanks) -> None:
    monkeypatch.setattr(other_ranks, "CLOSE_TIMEOUT_S", 0.0)
    boot(ranks, "stays")
    ranks.await_ready_to_join()
    ranks.mark_started()
    with pytest.raises(EngineDeadError, match="closed"):
        threading.Timer(0.05, ranks.close).start()
        while True:
            ranks.send(bytes(2**20))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc")
def test_terminal_signals_do_not_end_a_rank_that_has_just_been_launched(ranks: OtherRanks) -> None:
    for pid in ranks.pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        blocked, ignored = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert (blocked | ignored) >> (number - 1) & 1


def test_a_fork_of_the_engines_process_ends_no_rank(ranks: OtherRanks) -> None:
    runner: Runner = None  # type: ignore[assignment]  # no method is called
    end_ranks(runner, ranks, SingleRank(), os.getpid() + 1)
    assert all(map(alive, ranks.pids))


def test_a_process_that_cannot_be_started_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    ranks = OtherRanks(2)
    with pytest.raises(ResourceError, match="cannot start a process for another rank: No such file"):
        ranks.start()


@pytest.mark.parametrize(("own", "starting"), [(True, True), (True, False), (False, False)])
def test_a_lost_rank_ends_an_engines_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, starting: bool
) -> None:
    """The runner may wait in a kernel for ever. A process of the user's goes on."""
    reported: list[RoseinferError] = []
    ended = threading.Event()
    monkeypatch.setattr(leader, "EXIT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(leader.os, "_exit", lambda code: ended.set())
    ranks = OtherRanks(2, RankHost(tmp_path, report_error=reported.append) if own else None, MODULE)
    ranks.start()
    exit_on_loss(ranks, SingleRank(), starting=starting)
    os.kill(ranks.pids[0], signal.SIGKILL)
    until(lambda: ranks.failure is not None)
    assert ended.wait(10.0 if own else 0.1) == own
    assert reported == ([ranks.failure] if starting else [])
    ranks.close()
    assert list(tmp_path.iterdir()) == []
