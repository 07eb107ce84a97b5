"""Settings of all tests. Environment variables are set before torch is imported."""

import gc
import logging
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from xdist.scheduler import LoadFileScheduling

from tests.helpers import forked_starts
from tests.helpers.cases import leave_out_exhaustive

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Files run beside each other: a second thread for the small matrices of tests takes time from these and gains none.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Otherwise every process of a test would compile all its imports again, and every run all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Every HTTP client would read all certificates when it is created (20 ms), and none of ours uses TLS.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Without a GPU, Triton's interpreter runs the kernels; Triton reads this variable when it is imported. The device files
# tell, since most tests do not need torch.
if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with SIGINT ignored, and their children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines, since machines differ in speed. A failure is reported at once instead of being minimised for minutes;
# `--hypothesis-profile=default` minimises it.
settings.register_profile("prompt", phases=set(Phase) - {Phase.shrink, Phase.explain}, deadline=None, print_blob=True)
settings.load_profile("prompt")

# Collection makes a million objects and drops few: searching them for cycles takes a third of its time.
gc.disable()


# Files that share a server by fixtures of their package.
TOGETHER = ("tests/server/end_to_end/", "tests/server/clients/", "tests/console/")


class LoadSharedServers(LoadFileScheduling):
    """Give a worker all files that share a server, and otherwise one file at a time."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadSharedServers | None:
    return LoadSharedServers(config, log) if config.option.dist == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    leave_out_exhaustive(config.option.markexpr == "not exhaustive")
    if os.environ.get("TRITON_INTERPRET") == "1":  # no GPU: CUDA fails in forks of a process that has used it
        forked_starts.install()


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes as users do, not as forks of one that has imported the libraries (`helpers.forked_starts`)."""
    monkeypatch.setattr(subprocess, "Popen", forked_starts.executed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files so that no worker starts a long one at the end.

    Files marked `long` first. Then files with many tests, which compute, alternate with files with few, which mostly
    wait for processes.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    counts = Counter(item.path for item in items)
    long = {item.path for item in items if item.get_closest_marker("long") or item.nodeid.startswith(TOGETHER)}
    rest = sorted(counts.keys() - long, key=lambda path: (-counts[path], path))
    many, few = rest[: len(rest) // 2], rest[len(rest) // 2 :][::-1]
    turns = [path for pair in zip_longest(many, few) for path in pair if path is not None]
    place = {path: number for number, path in enumerate([*sorted(long), *turns])}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish() -> None:
    """Freeze the million objects of test modules and their imports: simulations and clients that collect garbage before
    they measure would search them for a second each time.

    Let all loggers of libraries propagate. In each phase of each test, pytest would add its handlers to those 60 of
    PyTorch that do not.
    """
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.unfreeze = lambda: None
    gc.enable()
