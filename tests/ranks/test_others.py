"""The processes of other ranks: their failures become rank 0's, and none is left, however it ends."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.core.errors import ConfigError, EngineDeadError, ResourceError, RoseinferError
from roseinfer.core.runner import Runner
from roseinfer.engine.llm import make_engine_config
from roseinfer.parallel.group import SingleRank
from roseinfer.ranks import leader, others
from roseinfer.ranks.build import build_led
from roseinfer.ranks.leader import end_on_loss
from roseinfer.ranks.others import Home, OtherRanks
from tests.helpers.acting_rank import MODULE
from tests.server.real_server import alive, until

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


def test_they_hear_what_they_are_told_until_the_end(ranks: OtherRanks) -> None:
    boot(ranks, "hears")
    ranks.await_here()
    ranks.started()
    for _ in range(20):
        ranks.tell(bytes(2**20))  # more than there is room for at once
    ranks.close()
    assert ranks.failure is None


@pytest.mark.parametrize(
    ("act", "kind", "said"),
    [
        ("fails", ConfigError, "^max_model_len is too much for this rank$"),
        ("breaks", EngineDeadError, "^rank [12] failed: RuntimeError: no more$"),
        ("lingers", EngineDeadError, "^rank [12] failed: RuntimeError: no more$"),
    ],
)
def test_what_keeps_one_from_starting_is_raised_as_what_it_is(
    ranks: OtherRanks, act: str, kind: type[Exception], said: str
) -> None:
    boot(ranks, act)
    with pytest.raises(kind, match=said):
        ranks.await_here()


def test_one_that_dies_before_it_is_told_anything(ranks: OtherRanks) -> None:
    os.kill(ranks.pids[1], signal.SIGKILL)
    until(lambda: ranks.failure is not None)
    boot(ranks, "hears")
    with pytest.raises(EngineDeadError, match="the process of rank 2 ended with code -9"):
        ranks.await_here()


def test_all_that_die_as_soon_as_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody has looked for the first time."""
    spawn = OtherRanks._spawn

    def dead(self: OtherRanks, number: int) -> others._Rank:
        rank = spawn(self, number)
        rank.process.kill()
        rank.process.wait()
        return rank

    monkeypatch.setattr(OtherRanks, "_spawn", dead)
    ranks = OtherRanks(2, module=MODULE)
    ranks.start()
    until(lambda: ranks.failure is not None)
    ranks.close()


def test_one_that_dies_while_all_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever makes the group waits for it no longer, and nothing is left of that. It is told once."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = OtherRanks(2, module=MODULE)
    ranks.start()
    with pytest.raises(EngineDeadError, match="the process of rank 1 ended with code -9"):
        build_led(make_engine_config(model="dies", device="cpu", tensor_parallel_size=2), Path("model"), ranks)
    until(lambda: not any(thread.name == "roseinfer-join" for thread in threading.enumerate()))
    assert not list(tmp_path.iterdir()) and not caplog.text


def test_when_rank_0_refuses_nobody_waits_for_the_others(monkeypatch: pytest.MonkeyPatch, ranks: OtherRanks) -> None:
    """Which hear nothing while they load."""
    monkeypatch.setattr(others, "CLOSE_PATIENCE_S", 3600.0)
    boot(ranks, "stays")
    ranks.await_here()
    ranks.close()


def test_without_a_ring_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(others, "RingWriter", no_memory)
    closed: list[int] = []
    monkeypatch.setattr(others.os, "close", closed.append)
    with pytest.raises(ResourceError, match="Cannot allocate memory"):
        OtherRanks(2)
    (store,) = closed
    monkeypatch.undo()
    os.close(store)


def test_when_one_dies_the_others_are_ended_and_calls_say_why(
    ranks: OtherRanks, caplog: pytest.LogCaptureFixture
) -> None:
    lost = threading.Event()
    ranks.on_loss = lost.set
    boot(ranks, "hears")
    ranks.await_here()
    ranks.started()
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert lost.wait(60)
    assert caplog.messages == [
        "the process of rank 1 ended with code -9 (killed, as the system does when memory runs out)"
    ]
    until(lambda: not any(map(alive, ranks.pids)))
    with pytest.raises(EngineDeadError, match="rank 1"):
        ranks.tell(b"anything")
    for error in (RuntimeError("connection closed"), EngineDeadError("waited in vain")):
        assert ranks.failure_behind(error) is ranks.failure
    assert ranks.failure_behind(ours := ConfigError("ours")) is ours


def test_an_error_that_no_rank_is_behind_stays_what_it_is(ranks: OtherRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "WORD_S", 0.0)
    assert ranks.failure_behind(error := RuntimeError("ours")) is error


def test_one_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch, ranks: OtherRanks) -> None:
    monkeypatch.setattr(others, "CLOSE_PATIENCE_S", 0.0)
    boot(ranks, "stays")
    ranks.await_here()
    ranks.started()
    with pytest.raises(EngineDeadError, match="closed"):
        threading.Timer(0.05, ranks.close).start()
        while True:
            ranks.tell(bytes(2**20))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks /proc")
def test_no_signal_to_the_whole_group_ends_one_that_has_just_begun(ranks: OtherRanks) -> None:
    for pid in ranks.pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        deaf = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigIgn"))]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert (deaf[0] | deaf[1]) >> (number - 1) & 1


def test_what_one_says_that_nobody_understands_is_its_failure(ranks: OtherRanks) -> None:
    boot(ranks, "babbles")
    with pytest.raises(EngineDeadError, match=r"rank [12] failed: it says what nobody understands: b'what\?'"):
        ranks.await_here()


def test_a_fork_of_the_engines_process_ends_nobody(ranks: OtherRanks) -> None:
    runner: Runner = None  # type: ignore[assignment]  # which is not asked anything
    leader._end(runner, ranks, SingleRank(), os.getpid() + 1)
    assert all(map(alive, ranks.pids))


def test_no_process_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others.sys, "executable", "/nonexistent/python")
    ranks = OtherRanks(2)
    with pytest.raises(ResourceError, match="no process can be had for another rank: No such file"):
        ranks.start()


@pytest.mark.parametrize(("own", "starts"), [(True, True), (True, False), (False, False)])
def test_a_loss_ends_a_process_that_is_the_engines_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, starts: bool
) -> None:
    """Its runner may wait in a kernel for ever; what a guest does is its host's business. Who starts says why."""
    told: list[RoseinferError] = []
    ended = threading.Event()
    monkeypatch.setattr(leader, "END_PATIENCE_S", 0.0)
    monkeypatch.setattr(leader.os, "_exit", lambda code: ended.set())
    ranks = OtherRanks(2, Home(tmp_path, tell=told.append) if own else None, MODULE)
    ranks.start()
    end_on_loss(ranks, SingleRank(), starts=starts)
    os.kill(ranks.pids[0], signal.SIGKILL)
    until(lambda: ranks.failure is not None)
    assert ended.wait(10.0 if own else 0.1) == own
    assert told == ([ranks.failure] if starts else [])
    ranks.close()
    assert list(tmp_path.iterdir()) == []
