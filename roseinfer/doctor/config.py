"""The options of `roseinfer doctor`."""

from dataclasses import dataclass

from roseinfer.core.errors import ConfigError
from roseinfer.core.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """What to look at beside the machine."""

    model: str | None = option(
        None, "a model to look at: 'tiny', a folder, a GGUF file, or a Hugging Face id", metavar="MODEL"
    )
    gguf_file: str | None = option(None, "the GGUF file of MODEL, a folder or an id, to look at", metavar="NAME")
    revision: str | None = option(None, "the branch, tag or commit of MODEL on the hub to look at")
    download_dir: str | None = option(None, "where downloads are kept; default: the hub's cache", metavar="DIR")
    port: int = option(8000, "the port that a server is to listen on")
    json: bool = option(False, "print the result as JSON")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be within [0, 65535], got {self.port}")
