"""Private folders for sockets and shared memory. None is left behind, even after `kill -9`.

The owner holds a lock on its folder. The next owner removes folders whose lock is free. A folder gets its name once it
is locked, so that none is removed while it is made.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from roseinfer.core.errors import ResourceError

# Limit of macOS; Linux takes four bytes more.
MAX_SOCKET_PATH_BYTES = 103
# A younger folder without its name may be one that its owner is about to lock.
MIN_UNNAMED_AGE_S = 60.0
_LONGEST_NAME = "engine999.new"
_PREFIX, _UNNAMED_PREFIX = "roseinfer-", ".roseinfer-"
_MARK = "locked"  # file that distinguishes our folders from others of that prefix

_locks: dict[Path, int] = {}


def private_folder() -> Path:
    """Make a private folder, after removing those of killed processes.

    Raises `ResourceError` if none can be made, or its path is too long for sockets.
    """
    try:
        _sweep(Path(tempfile.gettempdir()))
        unnamed = Path(tempfile.mkdtemp(prefix=_UNNAMED_PREFIX))
        folder = unnamed.with_name(unnamed.name.replace(_UNNAMED_PREFIX, _PREFIX, 1))
        _locks[folder] = os.open(unnamed, os.O_RDONLY)
        # systemd-tmpfiles, too, leaves locked folders alone.
        with contextlib.suppress(OSError):  # a file system without locks: then nobody else gets one either
            fcntl.flock(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
        (unnamed / _MARK).touch(0o600)
        unnamed.rename(folder)
    except OSError as error:
        raise ResourceError(
            f"cannot create a temporary folder ({error.strerror}); set TMPDIR to another path"
        ) from error
    length = len(os.fsencode(folder / _LONGEST_NAME))
    if length > MAX_SOCKET_PATH_BYTES:
        remove_folder(folder)
        excess = length - MAX_SOCKET_PATH_BYTES
        message = (
            f"the path {str(folder.parent)!r} is {excess} bytes too long for a socket; set TMPDIR to a shorter one"
        )
        raise ResourceError(message)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove a folder of this process, or of one that has ended. May be called again."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def _sweep(parent: Path) -> None:
    before_s = time.time() - MIN_UNNAMED_AGE_S
    for folder in (*parent.glob(f"{_PREFIX}*"), *parent.glob(f"{_UNNAMED_PREFIX}*")):
        try:
            status = folder.lstat()
            named = folder.name.startswith(_PREFIX)
            if status.st_uid == os.getuid() and (named or status.st_mtime < before_s):
                _remove_if_unlocked(folder)
        except OSError:  # just removed, locked, or not one of ours
            continue


def _remove_if_unlocked(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.stat(folder / _MARK)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
