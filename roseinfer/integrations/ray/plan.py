"""Plan of a deployment, from the command's options, for all processes of Ray."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from roseinfer.core.config.engine import PRICED, EngineConfig
from roseinfer.core.config.option import check_choices, check_positive, option
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError

APPLICATION = NAMESPACE = "roseinfer"
DIRECTORY = "directory"
EVERYWHERE = ("0.0.0.0", "::")
# What `print` writes: a Deployment and what it needs, a pool of its pods for gateways, or a Ray cluster by KubeRay.
K8S, INFERENCE_POOL, RAY_SERVICE = PRINTED = ("k8s", "inferencepool", "rayservice")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """Number of engines and API processes on Ray, and their addresses."""

    engines: int = option(1, "engines, each with all of the model")
    min_engines: int | None = option(None, "least engines, if their number is to follow the load; default: --engines")
    max_engines: int | None = option(None, "most engines, likewise")
    scale_down_after: float = option(600.0, "seconds in which fewer engines would have done before one goes")
    api_replicas: int = option(1, "processes that answer requests, behind HAProxy")
    bind: str = option(
        "127.0.0.1", "address to listen on: of one machine, or 0.0.0.0 for a cluster of several", metavar="ADDRESS"
    )
    engine_ports: str = option("7100-7199", "ports that engines listen on", metavar="LOW-HIGH")
    address: str | None = option(
        None, "the Ray cluster; default: RAY_ADDRESS, without it the one on this machine", metavar="HOST:PORT"
    )
    allow_no_authentication: bool = option(
        False, "deploy to a cluster without token authentication: who reaches its ports runs code on it"
    )
    print: str | None = option(
        None, "write manifests for Kubernetes to standard output instead, and deploy nothing", choices=PRINTED
    )
    image: str | None = option(
        None, "the container image that manifests name (default: roseinfer:cuda, without a GPU roseinfer:cpu)"
    )
    status: bool = option(False, "say how the deployment does, and change nothing")
    down: bool = option(False, "stop the deployment; the Ray cluster stays")

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "engines", "min_engines", "max_engines", "api_replicas", "scale_down_after")
        if not self.least <= self.engines <= self.most:
            raise ConfigError(
                f"engines: {self.engines} is not between min_engines ({self.least}) and max_engines ({self.most})"
            )
        _ = self.port_range

    @property
    def least(self) -> int:
        return self.engines if self.min_engines is None else self.min_engines

    @property
    def most(self) -> int:
        return self.engines if self.max_engines is None else self.max_engines

    @property
    def port_range(self) -> range:
        low, _, high = self.engine_ports.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low) < 65536):
            raise ConfigError(f"engine_ports must be two ports, as 7100-7199, got {self.engine_ports!r}")
        return range(int(low), int(high or low) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that the processes of a deployment are told. `replicas`: of one engine. `variables`: of the command's
    environment, what Ray is not to see: it writes the environments of its jobs into logs, and shows them.
    """

    deploy: DeployConfig
    engine: EngineConfig
    replicas: ReplicasConfig
    router: str
    server: ServerConfig
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    def set_variables(self) -> None:
        """Set the variables in this process, for the processes that it starts too."""
        os.environ.update(self.variables)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one engine."""
        return 0 if self.engine.model.device in (PRICED, "cpu") else self.engine.model.tensor_parallel_size

    @property
    def engine_cpus(self) -> float:
        """Return the cores that an engine needs: one for each GPU, next to none for a priced engine."""
        if self.engine.model.device == PRICED:
            return 0.1
        processes = self.engine.model.tensor_parallel_size
        return float(processes if self.gpus else processes * (self.engine.model.threads or 1))

    @property
    def api_cpus(self) -> float:
        return 0.5
