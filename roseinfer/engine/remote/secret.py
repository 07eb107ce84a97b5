"""The secret that the processes of one deployment share. It is in no command line, message, log or report."""

import logging
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from roseinfer.core.errors import ConfigError

log = logging.getLogger("roseinfer.engine.remote")

# Who connects to a port can try secrets at leisure once it has seen one handshake: a password would not do.
MIN_BYTES, MAX_BYTES = 16, 1024
_HINT = "make one with: openssl rand -hex 32"


@dataclass(frozen=True, slots=True)
class Secret:
    """`value`: at least `MIN_BYTES` bytes that nobody can guess. Raises `ConfigError` if they are fewer."""

    value: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not MIN_BYTES <= len(self.value) <= MAX_BYTES:
            raise ConfigError(f"a secret has {MIN_BYTES} to {MAX_BYTES} bytes, this one {len(self.value)}: {_HINT}")

    def now(self) -> "Secret":
        """It does not change."""
        return self


class SecretSource(Protocol):
    """`Secret` for one that stays, `SecretFile` for one that is replaced now and then."""

    def now(self) -> Secret:
        """What connections ask for that are made from now on."""
        ...


class SecretFile:
    """What the file at `path` has in it whenever it is asked for.

    So a secret is changed by writing another one into the files of all hosts: nobody who is connected loses anything,
    and who connects while hosts have different ones is refused, and tries again. A file that is gone or wrong is told
    once, and the secret before goes on.
    """

    def __init__(self, path: Path, first: Secret | None = None) -> None:
        """`first`: what it had when it was read before; None: it is read now. Raises what `read_secret` raises."""
        self.path = path.absolute()
        self._seen: tuple[int, ...] | None = self._look()
        self._secret = first or read_secret(path)

    def now(self) -> Secret:
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                found = read_secret(self.path)
            except ConfigError as error:
                log.warning("%s: the secret before goes on", error)
            else:
                if found != self._secret:
                    log.info("connections ask for another secret from now on")
                self._secret = found
        return self._secret

    def _look(self) -> tuple[int, ...] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns, status.st_size


def read_secret(path: Path) -> Secret:
    """What is in a file, without white space around it. Raises `ConfigError` if others may read the file or change it,
    and if there is none or no secret in it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            value = file.read(2 * MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"secret_file: cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"secret_file: {path} is no file")
    if status.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"secret_file: {path} belongs to another user")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and not _mounted(status):
        raise ConfigError(f"secret_file: others may read {path}: chmod 600 {path}")
    try:
        return Secret(value)
    except ConfigError as error:
        raise ConfigError(f"secret_file: {path}: {error}") from error


def _mounted(status: os.stat_result) -> bool:
    """Whether it is root's and only our group may read it, as Kubernetes mounts secrets for a process that is not."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO)
    return status.st_uid == 0 and os.getuid() != 0 and not others and status.st_gid in (os.getgid(), *os.getgroups())
