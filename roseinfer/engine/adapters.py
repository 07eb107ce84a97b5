"""LoRA adapters of an engine: the folders that it may read, and the names that requests use."""

import os
from collections import deque
from collections.abc import Callable, Iterable

from roseinfer.core.adapters import Adapter, AdapterFiles, AdapterRead
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.errors import InvalidRequestError, TooManyReadsError
from roseinfer.engine.adapter_names import AdapterNames, check_adapter_name

MAX_PATH_CHARS = 4096
FOLDER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Adapters that clients have asked for and that are being read.
MAX_READS_COUNT = 64

NO_ADAPTERS = "this engine serves no LoRA adapters: start it with --lora or --lora-dir"

OnRead = Callable[[AdapterRead], None]


class AdapterPaths:
    """Folders that may be read: those of `--lora`, and all below `--lora-dir`. Links to other places are not followed,
    neither of a folder nor of the files in it.
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._given = set(config.named.values())
        self._folders = {os.path.realpath(path) for path in self._given}
        self._root = None if config.lora_dir is None else os.path.realpath(config.lora_dir)

    def resolve(self, path: str) -> str:
        """Return the folder to read. A relative path is one below `--lora-dir`, if it was not given with `--lora`.

        Raise `InvalidRequestError` for any other folder, whether it exists or not.
        """
        if path in self._given:
            return path
        if not path or len(path) > MAX_PATH_CHARS or "\0" in path:
            raise InvalidRequestError(f"invalid adapter path (expected 1 to {MAX_PATH_CHARS} characters)", "path")
        folder = os.path.realpath(os.path.join(self._root or "", path))
        if not _is_text(folder):
            raise InvalidRequestError(f"adapter path {path!r} leads to a folder whose name is not UTF-8", "path")
        if folder in self._folders:
            return folder
        read = (folder, *(os.path.realpath(os.path.join(folder, name)) for name in FOLDER_FILES))
        if self._root is not None and all(_is_below(each, self._root) for each in read):
            return folder
        where = "--lora-dir is not set" if self._root is None else "only folders and files below --lora-dir are"
        raise InvalidRequestError(f"adapter path {path!r} is not allowed: {where}", "path")


def _is_text(path: str) -> bool:
    """True if messages can name this path."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_below(folder: str, root: str) -> bool:
    return folder != root and os.path.commonpath((folder, root)) == root


class AdapterRegistry:
    """Names of an engine's adapters, and its `AdapterFiles` with checked paths. An adapter keeps the path that it was
    asked for by, since the same path may be another folder on another host.

    Reads for clients (`read_for`) are results for the scheduler too: they are in host memory from then on.
    """

    def __init__(self, files: AdapterFiles, config: AdapterConfig, at_start: Iterable[Adapter] = ()) -> None:
        self.names = AdapterNames(at_start)
        self._files = files
        self._paths = AdapterPaths(config)
        # By name and folder, oldest first: the path that was asked for, and the client's callback.
        self._reading: dict[tuple[str, str], deque[tuple[str, OnRead | None]]] = {}
        self._refused: list[AdapterRead] = []
        self._reads_begun = self._reads_taken = 0
        # Copies to free, with the count of reads that had begun: one of these may give the same adapter.
        self._forgotten: dict[str, int] = {}

    @property
    def pending(self) -> bool:
        """True if `take_read` has results or will have some."""
        return bool(self._reading or self._refused)

    def read(self, name: str, path: str) -> None:
        try:
            self._begin(name, path, None)
        except InvalidRequestError as error:
            self._refused.append(AdapterRead(name, path, 0.0, error=error.message))

    def read_for(self, name: str, path: str, done: OnRead) -> None:
        """Read an adapter that is to get a name. `done` gets the result, at once if it is refused.

        Raise `TooManyReadsError` while the maximum of adapters is being read.
        """
        if sum(map(len, self._reading.values())) >= MAX_READS_COUNT:
            raise TooManyReadsError(f"{MAX_READS_COUNT} adapters are being loaded: try again later")
        try:
            check_adapter_name(name)
            self._begin(name, path, done)
        except InvalidRequestError as error:
            done(AdapterRead(name, path, 0.0, error=error.message))

    def _begin(self, name: str, path: str, done: OnRead | None) -> None:
        folder = self._paths.resolve(path)
        self._reading.setdefault((name, folder), deque()).append((path, done))
        self._files.read(name, folder)
        self._reads_begun += 1

    def take_read(self) -> list[AdapterRead]:
        """Return the results since the last call, except failures of reads for clients."""
        taken, self._refused = self._refused, []
        for read in self._files.take_read():
            path, done = self._finish(read)
            error = read.error and read.error.replace(read.path, path)
            read = read._replace(path=path, adapter=read.adapter and read.adapter._replace(path=path), error=error)
            if done is not None:
                done(read)
            if done is None or read.adapter is not None:
                taken.append(read)
            if read.adapter is not None:
                self._forgotten.pop(read.adapter.digest, None)
        self._free()
        return taken

    def _finish(self, read: AdapterRead) -> tuple[str, OnRead | None]:
        self._reads_taken += 1
        waiting = self._reading[read.name, read.path]
        first = waiting.popleft()
        if not waiting:
            del self._reading[read.name, read.path]
        return first

    def forget(self, digest: str) -> None:
        self._forgotten[digest] = self._reads_begun
        self._free()

    def _free(self) -> None:
        """Free the forgotten copies that no read in progress can give again."""
        due = [digest for digest, begun in self._forgotten.items() if begun <= self._reads_taken]
        for digest in due:
            del self._forgotten[digest]
            self._files.forget(digest)


def registry_at_start(files: AdapterFiles, config: AdapterConfig) -> AdapterRegistry:
    """Return the registry of a new engine, whose runner has read the adapters of `--lora`."""
    return AdapterRegistry(files, config, [read.adapter for read in files.take_read() if read.adapter is not None])
