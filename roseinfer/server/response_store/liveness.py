"""Detection of dead processes: each process holds a lock on a file beside the database while it lives."""

import fcntl
import os
import secrets
from pathlib import Path


class ProcessMark:
    """Lock of this process. `token` names it in the database. Raises `OSError` if the file cannot be made or locked.

    Files of processes that were killed are removed.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self.token = secrets.token_hex(8)
        new = database.with_name(f"{database.name}-new-{self.token}")
        self._descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self._path(self.token))  # locked from the start, so that nobody takes it for a dead one's
        except OSError:
            os.close(self._descriptor)
            new.unlink(missing_ok=True)
            raise
        for path in database.parent.glob(f"{database.name}-process-*"):
            self.alive(path.name.rpartition("-")[2])

    def alive(self, token: str) -> bool:
        """True while the process with this token lives."""
        if token == self.token:
            return True
        path = self._path(token)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            # Shared, so that two processes which check at the same time don't take each other for the owner.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        self._path(self.token).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _path(self, token: str) -> Path:
        return self._database.with_name(f"{self._database.name}-process-{token}")
