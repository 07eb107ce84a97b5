"""Plan of a deployment: the options of the command, as all its processes on Ray get them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from roseinfer.core.config.engine import PRICED, EngineConfig
from roseinfer.core.config.option import check_address, check_choices, check_positive, option
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError

APPLICATION = NAMESPACE = "roseinfer"
DIRECTORY = "directory"
ALL_ADDRESSES = ("0.0.0.0", "::")
# Kinds of manifests: a Deployment with its Service and volume, a pool of its pods for gateways, a cluster for KubeRay.
K8S, INFERENCE_POOL, RAY_SERVICE = MANIFEST_KINDS = ("k8s", "inferencepool", "rayservice")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployConfig:
    """Number of engines and API processes on Ray, and their addresses."""

    engines: int = option(1, "engines, each with the whole model")
    min_engines: int | None = option(
        None, "lower bound of the number of engines, which then follows the load; default: --engines"
    )
    max_engines: int | None = option(
        None, "upper bound of the number of engines, which then follows the load; default: --engines"
    )
    scale_down_after: float = option(
        600.0, "seconds for which fewer engines must have been enough before one is removed"
    )
    api_replicas: int | None = option(
        None, "processes that answer requests, behind HAProxy; default: 2 if there may be several engines, else 1"
    )
    bind: str = option(
        "127.0.0.1",
        "address to listen on: one of this machine, or 0.0.0.0 for a cluster of several machines",
        metavar="ADDRESS",
    )
    engine_ports: str = option("7100-7199", "ports that engines listen on", metavar="LOW-HIGH")
    address: str | None = option(
        None, "the Ray cluster; default: RAY_ADDRESS, else the cluster on this machine", metavar="HOST:PORT"
    )
    allow_no_authentication: bool = option(
        False, "deploy to a cluster without token authentication: anyone who reaches its ports can run code on it"
    )
    print: str | None = option(
        None, "write manifests for Kubernetes to standard output and deploy nothing", choices=MANIFEST_KINDS
    )
    image: str | None = option(
        None, "container image in the manifests (default: roseinfer:cuda, without a GPU roseinfer:cpu)"
    )
    status: bool = option(False, "print the status of the deployment, and change nothing")
    down: bool = option(False, "stop the deployment; the Ray cluster keeps running")

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, "engines", "min_engines", "max_engines", "api_replicas", "scale_down_after")
        if not self.lower_bound <= self.engines <= self.upper_bound:
            raise ConfigError(
                f"engines: {self.engines} is not between min_engines ({self.lower_bound}) and max_engines "
                f"({self.upper_bound})"
            )
        check_address(self, "bind")
        _ = self.port_range

    @property
    def lower_bound(self) -> int:
        return self.engines if self.min_engines is None else self.min_engines

    @property
    def upper_bound(self) -> int:
        return self.engines if self.max_engines is None else self.max_engines

    @property
    def api_processes(self) -> int:
        """Number of API processes. With one engine a second process would protect little."""
        return self.api_replicas or min(2, self.upper_bound)

    @property
    def port_range(self) -> range:
        low, _, high = self.engine_ports.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low) < 65536):
            raise ConfigError(f"engine_ports must be a range of ports like 7100-7199, got {self.engine_ports!r}")
        return range(int(low), int(high or low) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Options for all processes of a deployment. `replicas`: those of one engine.

    `deployment`: unique id, "" if the command does not wait for an answer. `variables`: secret variables of the
    command. They are not part of a job's environment, which Ray logs and shows.
    """

    deploy: DeployConfig
    engine: EngineConfig
    replicas: ReplicasConfig
    router: str
    server: ServerConfig
    deployment: str = ""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    def set_variables(self) -> None:
        """Set the variables in this process, for the processes that it starts too."""
        os.environ.update(self.variables)

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine."""
        return 0 if self.engine.model.device in (PRICED, "cpu") else self.engine.model.tensor_parallel_size

    @property
    def engine_cpus(self) -> float:
        """Cores that an engine needs: one for each GPU, and very little for a priced engine."""
        if self.engine.model.device == PRICED:
            return 0.1
        processes = self.engine.model.tensor_parallel_size
        return float(processes if self.gpus else processes * (self.engine.model.threads or 1))

    @property
    def api_cpus(self) -> float:
        return 0.5
