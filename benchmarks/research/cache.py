"""Cache of results on disk, so that unchanged runs are not simulated again."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from hashlib import sha256
from inspect import getfile
from pathlib import Path
from typing import Any

from roseinfer import sched
from roseinfer.sched.registry import entry_of


class Cache:
    """One JSON file per result, in a directory that is created if necessary."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def get(self, key: Any, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of `make` for this `key`, from this run or an earlier one."""
        name = digest_of(text=[json.dumps(key, sort_keys=True, default=repr)])
        file = self._directory / f"{name}.json"
        try:
            return dict(json.loads(file.read_text()))
        except (FileNotFoundError, ValueError):  # missing or truncated
            result = dict(make())
        self._directory.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(result))
        part.replace(file)  # readers never see a partial file
        return result


def policy_digest(name: str, *, with_shared: bool) -> str:
    """Return a digest of a policy's source, and of all scheduling code if `with_shared`.

    Without it, results survive a change to shared code: when one policy changes, the others are simulated once.
    """
    home = Path(getfile(entry_of(name).make))
    own = sorted(home.parent.glob("*.py")) if home.parent.name != "policies" else [home]
    return digest_of_files(tuple(map(str, [*own, *(scheduling_files() if with_shared else [])])))


def scheduling_files() -> list[Path]:
    root = Path(sched.__path__[0])
    own = root / "policies"
    return sorted(file for file in root.rglob("*.py") if own not in file.parents or own / "common" in file.parents)


def digest_of(files: Iterable[str | Path] = (), text: Iterable[str] = ()) -> str:
    """Return a digest of the contents of files and of texts, in order."""
    found = sha256()
    for file in files:
        found.update(digest_of_files((str(file),)).encode())
    for part in text:
        found.update(part.encode() + b"\n")
    return found.hexdigest()


@cache
def digest_of_files(files: tuple[str, ...]) -> str:
    """Return the files' digest at the first call, which is what runs."""
    found = sha256()
    for file in files:
        found.update(Path(file).read_bytes())
    return found.hexdigest()
