"""Options of several engines behind one server, and of an engine that serves other hosts."""

from collections.abc import Sequence
from dataclasses import dataclass

from roseinfer.core.config.option import check_choices, check_positive, option
from roseinfer.core.errors import ConfigError

DEFAULT_ROUTER = "pace"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """Number and devices of a server's engines, request routing, and engine timeouts.

    A `router` of None with several engines means `DEFAULT_ROUTER`. Names are checked where the router is made.
    """

    replicas: int | None = option(
        None, "number of engines, each with a full copy of the model; default: one for each of --devices, or 1"
    )
    devices: str | None = option(
        None,
        "GPUs of the engines, as 0,1, or 0+1,2+3 for several GPUs per engine, or 0+0 for two processes on one GPU, for "
        "testing; default: the first ones",
        metavar="LIST",
    )
    router: str | None = option(
        None, f"how requests are routed to several engines (default: {DEFAULT_ROUTER})", metavar="NAME"
    )
    engine_timeout: float = option(
        10.0, "seconds without a heartbeat after which an engine's requests continue on another engine"
    )
    drain_timeout: float = option(30.0, "seconds that requests may take to finish before their engine is restarted")
    engines: str | None = option(
        None, "use engines on other hosts, started there with `roseinfer engine`: a,b,...", metavar="HOST:PORT,..."
    )
    tls_dir: str | None = option(
        None, "folder with ca.crt, tls.crt and tls.key for engines on other hosts", metavar="DIR"
    )

    def __post_init__(self) -> None:
        check_positive(self, "replicas", "engine_timeout")
        if self.engines is not None:
            self._check_engines()
        if not self.drain_timeout >= 0:
            raise ConfigError(f"drain_timeout must not be negative, got {self.drain_timeout}")
        listed = self.device_list
        gpus = [gpu for each in listed for gpu in each.split("+")]
        if not all(gpu.isdecimal() for gpu in gpus):
            raise ConfigError(f"devices must be GPU numbers, as 0,1 or 0+1,2+3, got {self.devices!r}")
        named = [gpu for its in self.gpu_lists for gpu in (its[:1] if on_one_gpu(its) else its)]
        if len(set(named)) < len(named):
            once = "devices must name each GPU once, or one GPU for all processes of an engine, as 0+0"
            raise ConfigError(f"{once}, got {self.devices!r}")
        if listed and self.replicas is not None and self.replicas != len(listed):
            raise ConfigError(f"--replicas is {self.replicas}, but --devices names {len(listed)}: {self.devices}")
        if self.router is not None and self.count == 1:
            raise ConfigError("--router needs several engines; set --replicas or --devices")

    def _check_engines(self) -> None:
        for name in ("replicas", "devices"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} cannot be combined with --engines, which name engines on other hosts")
        if not all(self.engine_list) or len(set(self.engine_list)) < len(self.engine_list):
            raise ConfigError(f"engines must be different addresses HOST:PORT, got {self.engines!r}")
        if self.tls_dir is None:
            raise ConfigError("engines needs tls_dir: engines on other hosts require a certificate")

    @property
    def engine_list(self) -> tuple[str, ...]:
        """Return the addresses of engines on other hosts, or an empty tuple."""
        return () if self.engines is None else tuple(name.strip() for name in self.engines.split(","))

    @property
    def device_list(self) -> tuple[str, ...]:
        """Return the GPU numbers per engine, as "2" or "2+3", or an empty tuple."""
        return () if self.devices is None else tuple(name.strip() for name in self.devices.split(","))

    @property
    def gpu_lists(self) -> list[list[int]]:
        """Return the GPUs per engine, one for each of its processes, or an empty list."""
        return [[int(gpu) for gpu in each.split("+")] for each in self.device_list]

    @property
    def count(self) -> int:
        """Return the number of engines."""
        return self.replicas or len(self.device_list) or len(self.engine_list) or 1


def on_one_gpu(gpus: Sequence[int]) -> bool:
    """Return True if several processes of an engine are to share a GPU. `gpus`: one for each of them."""
    return len(gpus) > 1 and len(set(gpus)) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperConfig:
    """Options of an engine that serves other hosts. `bind` and `tls_dir` are required."""

    bind: str | None = option(
        None, "address to listen on; port 0 = any free port", aliases=("listen",), metavar="HOST:PORT"
    )
    tls_dir: str | None = option(
        None, "folder with ca.crt, tls.crt and tls.key (`roseinfer certificates`)", metavar="DIR"
    )
    devices: str | None = option(
        None, "GPU of the engine, as 2, or its GPUs, as 2+3; default: the first ones", metavar="GPU"
    )
    engine_timeout: float = option(
        10.0, "seconds without a heartbeat after which servers move requests to other engines"
    )
    stall_timeout: float = option(60.0, "seconds without a heartbeat after which the engine is killed")
    drain_timeout: float = option(
        30.0, "seconds that requests may take to finish after SIGTERM, and before a restart by SIGHUP"
    )
    log_level: str = option("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "how to write log lines: for people, or as JSON", choices=("text", "json"))

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "stall_timeout")
        if self.replicas.count > 1:
            raise ConfigError(f"devices must name the GPUs of one engine, joined by + as 0+1, got {self.devices!r}")

    @property
    def replicas(self) -> ReplicasConfig:
        """Return the config of this engine as one of a server's. Raise `ConfigError` if it is invalid."""
        return ReplicasConfig(
            devices=self.devices, engine_timeout=self.engine_timeout, drain_timeout=self.drain_timeout
        )
