"""What processes tell each other through a file that they share."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from roseinfer.core.errors import EngineDeadError
from roseinfer.parallel.shared_store import SharedStore

# As PyTorch does it: from C++, under a prefix.
OTHER = """
import sys
import torch.distributed as dist
from roseinfer.parallel.shared_store import SharedStore

kept = SharedStore(int(sys.argv[1]))
store = dist.PrefixStore("group", kept.clone())
counts = [store.add("count", 1) for _ in range(500)]
store.set("bytes", bytes([0, 255, 10]))
store.set("text", store.get("word") * 2)
assert not store.check(["nothing"])
store.wait(["end"])
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def test_two_processes_see_what_either_says(descriptor: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", OTHER, str(descriptor)], pass_fds=[descriptor])
    try:
        kept = SharedStore(descriptor)
        store = dist.PrefixStore("group", kept)
        for _ in range(500):
            store.add("count", 1)
        store.set("word", "said")
        assert store.get("text") == b"saidsaid" and store.get("bytes") == bytes([0, 255, 10])
        assert store.add("count", 0) == 1000, "none was lost"
        assert kept.check(["group/count", "group/word"]) and not kept.check(["group/count", "count"])
        store.set("end", "")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_last_value_counts_also_for_who_comes_later(descriptor: int) -> None:
    store = SharedStore(descriptor)
    store.set("a", "long " * 1000)
    store.set("a", "")
    assert store.get("a") == b"" == SharedStore(descriptor).get("a")


def test_who_waits_is_told_when_it_is_in_vain(descriptor: int) -> None:
    def go_on() -> None:
        raise EngineDeadError("rank 1 has died")

    kept = SharedStore(descriptor, go_on)
    with pytest.raises(EngineDeadError, match="rank 1 has died"):
        dist.PrefixStore("group", kept).get("a")
    with pytest.raises(dist.DistStoreError, match="waited in vain for what other processes say of a, b"):
        SharedStore(descriptor).wait(["a", "b"], timedelta(milliseconds=5))
    kept.set("a", "here")  # and it goes on as before
    assert kept.get("a") == b"here"


def test_nothing_is_left_open(descriptor: int) -> None:
    store = SharedStore(descriptor)
    own = store._file
    del store
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
