"""Adapters of an engine of several ranks: all read the same content, or none uses it."""

import os
from collections import deque

import pytest

from roseinfer.core.plan import StepPlan
from roseinfer.ranks.adapters import LeadingAdapters
from roseinfer.ranks.boot import RankRead
from roseinfer.ranks.calls import CLOSE, Call, CallReader, CallWriter, SampledDigest
from roseinfer.ranks.process import follow
from roseinfer.ranks.ring import RingReader, RingWriter
from tests.helpers.adapter_files import FakeAdapterFiles, adapter
from tests.ranks.test_follow import RecordingRunner


class ScriptedRanks:
    """Other ranks that record calls, and whose answers a test adds."""

    def __init__(self) -> None:
        self.sent: list[tuple] = []
        self.answers: deque[list[RankRead]] = deque()
        self._calls = CallReader()

    def send(self, message: bytes) -> None:
        data = bytearray(message)
        if data[0] == Call.READ:
            self.sent.append(("read", *self._calls.read(data)))
        else:
            assert data[0] == Call.FORGET
            self.sent.append(("forget", self._calls.forget(data)))

    def take_reads(self) -> list[RankRead] | None:
        return self.answers.popleft() if self.answers else None


GOOD, OTHER = adapter("a", "content").digest, "f" * 64


def leading(**contents: str) -> tuple[LeadingAdapters, FakeAdapterFiles, ScriptedRanks]:
    """Return files of three ranks, of which rank 0 finds these contents in folders."""
    own, others = FakeAdapterFiles({f"/{name}": content for name, content in contents.items()}), ScriptedRanks()
    return LeadingAdapters(own, others), own, others  # type: ignore[arg-type]


def test_a_read_ends_when_all_ranks_have_read_the_same() -> None:
    files, own, others = leading(a="content")
    files.read("name", "/a")
    assert own.asked == [("name", "/a")] and others.sent == [("read", "name", "/a")]
    assert files.take_read() == []
    others.answers.append([RankRead(GOOD), RankRead(GOOD)])
    (found,) = files.take_read()
    assert found.adapter is not None and found.adapter.digest == GOOD and found.error is None
    assert files.take_read() == []


def test_adapters_of_the_options_need_no_answers() -> None:
    own = FakeAdapterFiles({"/a": "content"})
    own.read("name", "/a")
    files = LeadingAdapters(own, ScriptedRanks())  # type: ignore[arg-type]
    assert [found.adapter.digest for found in files.take_read() if found.adapter] == [GOOD]
    assert files.take_read() == []


@pytest.mark.parametrize(
    ("content", "answers", "error", "forgotten"),
    [
        ("content", [RankRead(GOOD), RankRead(error="gone")], "gone", {GOOD}),
        ("content", [RankRead(GOOD), RankRead(OTHER)], "/a: the files changed while they were read", {GOOD, OTHER}),
        (None, [RankRead(error="gone"), RankRead(OTHER)], "no adapter in '/a'", {OTHER}),
        (None, [RankRead(error="gone"), RankRead(error="gone")], "no adapter in '/a'", set()),
    ],
)
def test_an_adapter_that_one_rank_lacks_is_used_by_none(content, answers, error, forgotten) -> None:
    files, own, others = leading(**({"a": content} if content else {}))
    files.read("name", "/a")
    others.answers.append(answers)
    (found,) = files.take_read()
    assert found.adapter is None and found.error == error
    assert set(own.forgotten) == {digest for _, digest in others.sent[1:]} == forgotten


def test_a_failed_read_keeps_the_same_adapter_from_before() -> None:
    files, own, others = leading(a="content")
    for answer in (RankRead(GOOD), RankRead(error="gone")):
        files.read("name", "/a")
        others.answers.append([answer, answer])
        (found,) = files.take_read()
    assert found.error == "gone" and not own.forgotten
    files.forget(GOOD)
    assert own.forgotten == [GOOD] and others.sent[-1] == ("forget", GOOD)


def test_what_a_later_read_holds_on_all_ranks_is_kept() -> None:
    files, own, others = leading(a="content")
    for name in ("before", "after"):  # the folder changes while ranks read it for the first time
        files.read(name, "/a")
    others.answers.append([RankRead(OTHER), RankRead(GOOD)])
    (found,) = files.take_read()
    assert found.adapter is None and not own.forgotten
    others.answers.append([RankRead(GOOD), RankRead(GOOD)])
    (found,) = files.take_read()
    assert found.adapter is not None and own.forgotten == [OTHER]


def test_a_rank_reads_and_forgets_between_steps() -> None:
    size, files = 1 << 16, FakeAdapterFiles()
    writer, calls = RingWriter(1, lambda: None, size), CallWriter()
    with RingReader(os.dup(writer.memory), os.dup(writer.wake_pipes[0]), 0, 1, size, 0.0) as reader:
        writer.write(calls.read("a", "/a"))
        writer.write(calls.submit(StepPlan(1, []), SampledDigest()))
        writer.write(calls.forget("0" * 64))
        writer.write(CLOSE)
        runner = RecordingRunner()
        follow(reader, runner, lambda: None, files)
    writer.close()
    assert runner.calls == [("submit", 1), "close"]
    assert files.asked == [("a", "/a")] and files.forgotten == ["0" * 64]
