"""Adapters without files: folders that a test fills, read when it says so."""

from hashlib import sha256
from pathlib import Path

from roseinfer.core.adapters import Adapter, AdapterRead
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.engine.adapters import AdapterRegistry


def adapter(name: str = "a", content: str = "", path: str | None = None, rank: int = 8) -> Adapter:
    """Return an adapter whose digest depends on `content` alone."""
    return Adapter(name, sha256(content.encode()).hexdigest(), path or f"/adapters/{name}", rank, 1000)


class FakeAdapterFiles:
    """An `AdapterFiles`. `contents`: what is in each folder. `slow`: nothing is read before the next `finish`."""

    def __init__(self, contents: dict[str, str] | None = None, slow: bool = False) -> None:
        self.contents = dict(contents or {})
        self.slow = slow
        self.asked: list[tuple[str, str]] = []
        self.forgotten: list[str] = []
        self._begun: list[tuple[str, str]] = []
        self._results: list[AdapterRead] = []

    def read(self, name: str, path: str) -> None:
        self.asked.append((name, path))
        self._begun.append((name, path))
        if not self.slow:
            self.finish()

    def finish(self) -> None:
        for name, path in self._begun:
            if path in self.contents:
                result = AdapterRead(name, path, 0.01, adapter(name, self.contents[path], path))
            else:
                result = AdapterRead(name, path, 0.01, error=f"no adapter in {path!r}")
            self._results.append(result)
        self._begun.clear()

    def take_read(self) -> list[AdapterRead]:
        results, self._results = self._results, []
        return results

    def forget(self, digest: str) -> None:
        self.forgotten.append(digest)


def files_below(folder: Path, slow: bool = False, **contents: str) -> FakeAdapterFiles:
    """Return files with a subfolder of `folder` for each content."""
    return FakeAdapterFiles({str(folder.resolve() / name): content for name, content in contents.items()}, slow)


def registry(folder: Path, files: FakeAdapterFiles) -> AdapterRegistry:
    """Return the registry of an engine that may read below `folder`."""
    return AdapterRegistry(files, AdapterConfig(lora_dir=str(folder)))
