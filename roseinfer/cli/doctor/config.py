"""Options of `roseinfer doctor`."""

from dataclasses import dataclass

from roseinfer.core.config.option import option
from roseinfer.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """Optional checks beyond the machine."""

    model: str | None = option(
        None, "model to check: 'tiny', a folder, a GGUF file, or a Hugging Face id", metavar="MODEL"
    )
    gguf_file: str | None = option(None, "GGUF file in MODEL's folder or repository", metavar="NAME")
    revision: str | None = option(None, "branch, tag or commit of MODEL on the hub")
    download_dir: str | None = option(None, "folder of downloads; default: the hub's cache", metavar="DIR")
    port: int | None = option(None, "port of the server; default: 8000, none with --bind")
    engines: str | None = option(None, "engines on other hosts to check", metavar="HOST:PORT,...")
    tls_dir: str | None = option(None, "folder with the certificates for --engines, or for --bind", metavar="DIR")
    bind: str | None = option(None, "address for `engine` to listen on", metavar="HOST:PORT")
    ray_address: str | None = option(
        None, "Ray cluster for `deploy`; auto: the one on this machine", metavar="HOST:PORT"
    )
    json: bool = option(False, "print the result as JSON")

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be within [0, 65535], got {self.port}")
        if self.engines is not None and self.tls_dir is None:
            raise ConfigError("engines needs tls_dir: engines on other hosts require a certificate")

    @property
    def server_port(self) -> int | None:
        """Return the port to check; None if no server is to listen here, as on the host of an engine."""
        return 8000 if self.port is None and self.bind is None else self.port

    @property
    def engine_list(self) -> tuple[str, ...]:
        return () if self.engines is None else tuple(name.strip() for name in self.engines.split(","))
