"""Folders of a server's own, for its sockets and what its processes share; none is left behind."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from roseinfer.core.errors import ResourceError

# Of a Unix socket's address, on macOS; Linux takes four more.
MAX_SOCKET_PATH_BYTES = 103
_LONGEST_NAME = "engine999.new"
_PREFIX = "roseinfer-"
# That a folder is one of these, and its owner has it locked as long as it lives.
_MARK = "locked"
# A folder that is younger may be one that its owner is just about to lock.
_LEAST_AGE_S = 60.0

_locks: dict[Path, int] = {}


def private_folder() -> Path:
    """A new folder. Raises `ResourceError` if there is none to be had, or its path is too long for sockets.

    Folders of servers that were killed when they had no engine, which would have removed it, are removed first.
    """
    try:
        _sweep(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        _locks[folder] = os.open(folder, os.O_RDONLY)
        # What cleans temporary folders (systemd-tmpfiles) leaves those alone that are locked.
        with contextlib.suppress(OSError):  # a file system without locks: then nobody else gets one either
            fcntl.flock(_locks[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / _MARK).touch(0o600)
    except OSError as error:
        raise ResourceError(f"no temporary folder can be made ({error.strerror}): set TMPDIR to one") from error
    length = len(os.fsencode(folder / _LONGEST_NAME))
    if length > MAX_SOCKET_PATH_BYTES:
        remove_folder(folder)
        message = f"the path of the temporary folder {folder.parent} is too long for a socket, by "
        raise ResourceError(f"{message}{length - MAX_SOCKET_PATH_BYTES} bytes: set TMPDIR to a shorter one")
    return folder


def remove_folder(folder: Path) -> None:
    """What this process got from `private_folder`, or what somebody else did who has ended."""
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _LEAST_AGE_S:
                _remove_if_left(folder)
        except OSError:  # it has just been removed, or is no such folder
            continue


def _remove_if_left(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.stat(folder / _MARK)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
