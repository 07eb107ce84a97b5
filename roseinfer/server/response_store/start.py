"""Opening the store that a server's options ask for."""

from pathlib import Path

from roseinfer.core.config.server import ServerConfig
from roseinfer.server.response_store.records import StoreBounds, StoreObserver
from roseinfer.server.response_store.store import SqliteStore, check_file

_TEMPORARY_NAME = "responses.db"


def response_file(config: ServerConfig, folder: Path | None) -> Path | None:
    """Return the file that all API processes share, None if responses are not stored. `folder`: for a temporary file,
    None if there is no such folder. Raises `ConfigError` if a file that was asked for cannot be used.
    """
    if not config.stores_responses:
        return None
    if config.response_store is None:
        return None if folder is None else folder / _TEMPORARY_NAME
    path = Path(config.response_store).absolute()
    check_file(path, StoreBounds.of(config))
    return path


def open_store(config: ServerConfig, path: Path, observer: StoreObserver) -> SqliteStore:
    """Open the store of this process. Raises `ConfigError` if the file cannot be used."""
    return SqliteStore(path, StoreBounds.of(config), observer, durable=config.response_store is not None)
