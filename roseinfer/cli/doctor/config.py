"""Options of `roseinfer doctor`."""

from dataclasses import dataclass

from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """What to check beside the machine."""

    model: str | None = option(
        None, "a model to look at: 'tiny', a folder, a GGUF file, or a Hugging Face id", metavar="MODEL"
    )
    gguf_file: str | None = option(None, "the GGUF file of MODEL, a folder or an id, to look at", metavar="NAME")
    revision: str | None = option(None, "the branch, tag or commit of MODEL on the hub to look at")
    download_dir: str | None = option(None, "where downloads are kept; default: the hub's cache", metavar="DIR")
    port: int | None = option(None, "the port that a server is to listen on; default: 8000, and none with --bind")
    engines: str | None = option(
        None, "engines on other hosts that `serve` is to use; each is asked how it does", metavar="HOST:PORT,..."
    )
    secret_file: str | None = option(None, "the file with their secret, or that of --bind", metavar="FILE")
    bind: str | None = option(None, "the address that `engine` is to listen on here", metavar="HOST:PORT")
    ray_address: str | None = option(
        None, "the Ray cluster that `deploy` is to use; auto: the one on this machine", metavar="HOST:PORT"
    )
    json: bool = option(False, "print the result as JSON")

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be within [0, 65535], got {self.port}")
        if self.engines is not None and self.secret_file is None:
            raise ConfigError("engines: others' engines ask for a secret: give a secret_file")

    @property
    def server_port(self) -> int | None:
        """Return the port to check; None if no server is to listen here, as on the host of an engine."""
        return 8000 if self.port is None and self.bind is None else self.port

    @property
    def engine_list(self) -> tuple[str, ...]:
        return () if self.engines is None else tuple(name.strip() for name in self.engines.split(","))
