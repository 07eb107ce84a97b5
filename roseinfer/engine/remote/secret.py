"""The secret that the processes of one deployment share. It is in no command line, message, log or report."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from roseinfer.core.errors import ConfigError

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
