"""Set before torch is imported: tests run side by side with servers and engines of their own on few cores."""

import gc
import os
import signal
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import Phase, settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every HTTP client reads all certificates when it is made, which takes 20 ms, and none of ours speaks TLS.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Without a GPU Triton's kernels run under its interpreter, which it has to know before it is imported. The question is
# put to the device files: torch is not imported here, as most tests have no need of it.
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Who is started in the background by a shell is deaf to Ctrl+C, as is every process that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a machine of any speed: no deadlines, and a failure is told at once, with what reproduces it, instead of being made
# smaller for minutes, which would take a whole run beyond its time. `--hypothesis-profile=default` makes it smaller.
settings.register_profile("prompt", phases=set(Phase) - {Phase.shrink, Phase.explain}, deadline=None, print_blob=True)
settings.load_profile("prompt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several workers take files of tests, in which order, so that none has a long one left at the end.

    Those marked as `long` first. Then by turns one of many tests, which compute, and one of few, which mostly wait for
    processes.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    counts = Counter(item.path for item in items)
    long = {item.path for item in items if item.get_closest_marker("long")}
    rest = sorted(counts.keys() - long, key=lambda path: (-counts[path], path))
    many, few = rest[: len(rest) // 2], rest[len(rest) // 2 :][::-1]
    turns = [path for pair in zip_longest(many, few) for path in pair if path is not None]
    place = {path: number for number, path in enumerate([*sorted(long), *turns])}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """All test modules and what they import are a million objects, which everybody who collects garbage on purpose, as
    simulations and clients do before they measure, would look through for a second: they stay frozen.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
