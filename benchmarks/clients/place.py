"""Environment of a client: a temporary home and working folder, without this machine's variables."""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 240.0
NOTES = "notes.txt"
# Nothing listens there: requests to other hosts than the server fail at once.
NOWHERE = "http://127.0.0.1:9"


class InstallError(Exception):
    """A client could not be installed; the text says why."""


def install_step(command: Sequence[str], folder: Path | None = None) -> str:
    """Run a command that installs something, and return its output. Raise `InstallError`."""
    try:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise InstallError(f"{command[0]} not found; install it first") from error
    except subprocess.CalledProcessError as error:
        raise InstallError(f"{' '.join(command)}: {error.stderr[-2000:]}") from error


@dataclass(frozen=True, slots=True)
class Run:
    """A finished command. `output`: stdout and stderr together."""

    code: int
    output: str


class Place:
    """Context manager of a client's environment. `home` and `work` exist inside; `work` contains one small file.

    `url`: the server as clients see it, without a path. `model`: the name that it serves.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self._temporary = tempfile.TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True)
        self.home = Path(self._temporary.name) / "home"
        self.work = Path(self._temporary.name) / "work"

    def __enter__(self) -> "Place":
        self.home.mkdir()
        self.work.mkdir()
        (self.work / NOTES).write_text("Buy milk.\n")
        return self

    def __exit__(self, *exc: object) -> None:
        self._temporary.cleanup()

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> Run:
        """Run a command in `work` with these variables and PATH, HOME, LANG and the proxy settings only."""
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
        exempt = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        plain = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8"}
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=self.work,
                env=plain | proxies | exempt | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
            return Run(-1, f"{output}\nno end after {TIMEOUT_S:.0f} s")
        return Run(done.returncode, done.stdout)
