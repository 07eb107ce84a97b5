"""Private folders are removed by their owner, or by a later one if that was killed."""

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.core.errors import ResourceError
from roseinfer.processes.private_folder import MIN_UNNAMED_AGE_S, private_folder, remove_folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:  # pytest's own paths are too long for sockets
        monkeypatch.setattr(tempfile, "tempdir", parent)
        yield Path(parent)


def age(folder: Path, seconds: float) -> None:
    long_ago_s = time.time() - seconds
    os.utime(folder, (long_ago_s, long_ago_s))


def test_a_folder_is_removed_with_its_content() -> None:
    gc.collect()  # what other tests have left
    before = len(os.listdir("/dev/fd"))
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "board").write_text("x")
    remove_folder(folder)
    remove_folder(folder)
    assert not folder.exists() and len(os.listdir("/dev/fd")) == before


KILLED = """
import os, signal
from roseinfer.processes.private_folder import private_folder
print(private_folder(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_owner_is_removed_at_the_next_start(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, env=environment)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    mine = private_folder()
    assert list(temporary.iterdir()) == [mine]
    others, unnamed = temporary / "roseinfer-notes", temporary / ".roseinfer-abc"
    for folder, file in ((others, "diary"), (unnamed, "locked")):
        folder.mkdir()
        (folder / file).touch()
    new = private_folder()
    assert sorted(temporary.iterdir()) == sorted([mine, new, others, unnamed]), "one may be in the making"
    for folder in (mine, others, unnamed):
        age(folder, MIN_UNNAMED_AGE_S + 1)
    last = private_folder()
    assert sorted(temporary.iterdir()) == sorted([mine, new, others, last]), (
        "not one whose owner lives, nor other files"
    )
    for folder in (mine, new, last):
        remove_folder(folder)


def test_a_folder_that_cannot_be_made_raises(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with pytest.raises(ResourceError, match="set TMPDIR to another"):
        private_folder()
    long = temporary / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ResourceError, match="bytes too long for a socket"):
        private_folder()
    assert not list(long.iterdir())
