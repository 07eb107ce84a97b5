"""The options of several engines behind one server, and of one that is kept for servers on other hosts."""

from dataclasses import dataclass

from roseinfer.core.config.option import check_choices, check_positive, option
from roseinfer.core.errors import ConfigError

DEFAULT_ROUTER = "pace"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """How many engines a server has, where they run, how requests are spread over them, and when one is given up.

    With a `router` of None and several engines it is `DEFAULT_ROUTER`; who makes one knows the names.
    """

    replicas: int | None = option(
        None, "engines, each with all of the model; default: one for each of --devices, without them one"
    )
    devices: str | None = option(
        None,
        "GPUs of the engines, as 0,1, or 0+1,2+3 for engines of several; default: the first ones",
        metavar="LIST",
    )
    router: str | None = option(
        None, f"how requests are spread over several engines (default: {DEFAULT_ROUTER})", metavar="NAME"
    )
    engine_timeout: float = option(
        10.0, "seconds without a sign of life after which another engine goes on with an engine's requests"
    )
    drain_timeout: float = option(
        30.0, "seconds in which the requests of an engine that is restarted on purpose may finish where they are"
    )
    engines: str | None = option(
        None, "engines on other hosts instead, which `roseinfer engine` keeps there: a,b,...", metavar="HOST:PORT,..."
    )
    secret_file: str | None = option(None, "a file with the secret that engines on other hosts ask for", metavar="FILE")

    def __post_init__(self) -> None:
        check_positive(self, "replicas", "engine_timeout")
        if self.engines is not None:
            self._check_engines()
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must not be negative, got {self.drain_timeout}")
        listed = self.device_list
        gpus = [gpu for each in listed for gpu in each.split("+")]
        if not all(gpu.isdecimal() for gpu in gpus):
            raise ConfigError(f"devices must be numbers of GPUs, as 0,1 or 0+1,2+3, got {self.devices!r}")
        if len(set(map(int, gpus))) < len(gpus):
            raise ConfigError(f"devices: a GPU holds one engine, {self.devices} names one twice")
        if listed and self.replicas is not None and self.replicas != len(listed):
            raise ConfigError(f"replicas is {self.replicas}, but devices names {len(listed)}: {self.devices}")
        if self.router is not None and self.count == 1:
            raise ConfigError("router: there is nothing to choose with one engine; give replicas or devices")

    def _check_engines(self) -> None:
        for name in ("replicas", "devices"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: the engines that are named with engines are others'; it is for our own")
        if not all(self.engine_list) or len(set(self.engine_list)) < len(self.engine_list):
            raise ConfigError(f"engines must be different ones, each HOST:PORT, got {self.engines!r}")
        if self.secret_file is None:
            raise ConfigError("engines: others' engines ask for a secret: give a secret_file")

    @property
    def engine_list(self) -> tuple[str, ...]:
        """Where the engines are that others keep; empty if we have our own."""
        return () if self.engines is None else tuple(name.strip() for name in self.engines.split(","))

    @property
    def device_list(self) -> tuple[str, ...]:
        """The numbers of the GPUs that were named, for each engine, as "2" or "2+3"; empty if none were."""
        return () if self.devices is None else tuple(name.strip() for name in self.devices.split(","))

    @property
    def count(self) -> int:
        """How many engines there are to be."""
        return self.replicas or len(self.device_list) or len(self.engine_list) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperConfig:
    """Keeping one engine for servers on other hosts. `bind` and `secret_file` must be given."""

    bind: str | None = option(
        None, "the one address to listen on; port 0 = any free one", aliases=("listen",), metavar="HOST:PORT"
    )
    secret_file: str | None = option(
        None, "a file with the secret that servers must know, at least 16 bytes", metavar="FILE"
    )
    devices: str | None = option(
        None, "the GPU of the engine, as 2, or its GPUs, as 2+3; default: the first ones", metavar="GPU"
    )
    engine_timeout: float = option(
        10.0, "seconds without a sign of life after which servers are told to go on with other engines"
    )
    stall_timeout: float = option(60.0, "seconds without a sign of life after which the engine is killed")
    drain_timeout: float = option(
        30.0, "seconds in which requests may finish here after SIGTERM, and before a restart on purpose (SIGHUP)"
    )
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "how to write log lines: for people, or as JSON", choices=("text", "json"))

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "stall_timeout")
        if self.replicas.count > 1:
            raise ConfigError(
                f"devices: these are of several engines, got {self.devices}: join one's GPUs by +, as 0+1"
            )

    @property
    def replicas(self) -> ReplicasConfig:
        """The engine as one of a server's. Raises `ConfigError`."""
        return ReplicasConfig(
            devices=self.devices, engine_timeout=self.engine_timeout, drain_timeout=self.drain_timeout
        )
