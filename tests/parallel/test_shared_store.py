"""Store of two processes over a shared file."""

import gc
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

# `PrefixStore` calls the store from C++, as PyTorch does.
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


def test_two_processes_see_each_others_values(descriptor: int) -> None:
    command = [sys.executable, "-m", "tests.helpers.run_code", OTHER, str(descriptor)]
    process = subprocess.Popen(command, pass_fds=[descriptor])
    try:
        kept = SharedStore(descriptor)
        store = dist.PrefixStore("group", kept)
        for _ in range(500):
            store.add("count", 1)
        store.set("word", "abc")
        assert store.get("text") == b"abcabc" and store.get("bytes") == bytes([0, 255, 10])
        assert store.add("count", 0) == 1000, "none was lost"
        assert kept.check(["group/count", "group/word"]) and not kept.check(["group/count", "count"])
        store.set("end", "")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_last_value_counts_also_for_later_processes(descriptor: int) -> None:
    store = SharedStore(descriptor)
    store.set("a", "long " * 1000)
    store.set("a", "")
    assert store.get("a") == b"" == SharedStore(descriptor).get("a")


def test_a_wait_ends_with_an_error_of_its_callback_or_after_its_timeout(descriptor: int) -> None:
    def on_wait() -> None:
        raise EngineDeadError("rank 1 has died")

    kept = SharedStore(descriptor, on_wait)
    with pytest.raises(EngineDeadError, match="rank 1 has died"):
        dist.PrefixStore("group", kept).get("a")
    with pytest.raises(dist.DistStoreError, match="timed out waiting for keys of other processes: a, b"):
        SharedStore(descriptor).wait(["a", "b"], timedelta(milliseconds=5))
    kept.set("a", "here")  # and it goes on as before
    assert kept.get("a") == b"here"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc")
def test_no_descriptor_is_left_open(descriptor: int) -> None:
    gc.collect()  # what other tests have left
    before = os.listdir("/proc/self/fd")
    store = SharedStore(descriptor)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del store
    assert os.listdir("/proc/self/fd") == before
