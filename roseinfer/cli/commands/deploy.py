"""roseinfer deploy: engines and API processes on a Ray cluster, or manifests for Kubernetes."""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roseinfer.cli.commands.groups import ENGINE, engine_config
from roseinfer.cli.commands.serve import check_classes, check_predictor, with_keys
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.replicas import DEFAULT_ROUTER, ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.integrations.otel.endpoint import with_traces
from roseinfer.integrations.ray.plan import ALL_ADDRESSES, RAY_SERVICE, DeployConfig, Plan
from roseinfer.router.registry import ROUTERS

if TYPE_CHECKING:
    from roseinfer.integrations.ray.cluster import DeploymentStatus

NAME = "deploy"
HELP = "serve a model with engines on a Ray cluster"
# Options of `serve` that the deployment replaces by its own options or sets itself.
REPLACED_OPTIONS = frozenset({"replicas", "devices", "engines", "tls_dir"})
ENGINES = Group(ReplicasConfig, "routing", skip=REPLACED_OPTIONS, choices={"router": ROUTERS})
# The API processes of a deployment share no file in which they could store responses.
STORE_OPTIONS = {"response_store", "response_store_max_count", "response_store_max_bytes", "response_store_max_days"}
# HAProxy is in front of the API processes.
TLS_OPTIONS = {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"}
OWN_OPTIONS = {"host", "uds", "api_workers", "worker_timeout"}
SERVER = Group(ServerConfig, "server", skip=frozenset(OWN_OPTIONS | STORE_OPTIONS | TLS_OPTIONS))
# Variables for the deployment that Ray must not show. Those of OpenTelemetry may contain keys and are hidden too.
HIDDEN_VARIABLES = frozenset({"HF_TOKEN"})
DEPLOYMENT = Group(DeployConfig, "deployment")
OPTIONS = OptionSet(*ENGINE, DEPLOYMENT, ENGINES, SERVER, vllm=True)


def run(args: Namespace) -> int:
    from roseinfer.integrations.ray import cluster

    given = OPTIONS.read(args)
    config = OPTIONS.build(DeployConfig, given)
    if config.print is not None:
        print(_manifests(config.print, given), end="")
        return 0
    if config.status or config.down:
        cluster.connect(config.address)
        if config.down:
            cluster.down()
            print("roseinfer is no longer deployed")
        else:
            _show(cluster.status())
        return 0
    plan = _checked(_plan(config, given, os.environ))
    cluster.require_ray()
    cluster.connect(config.address, cluster.environment(plan))
    cluster.deploy(cluster.check(plan), print)
    print(_greeting(plan))
    return 0


def build_application(arguments: dict[str, Any]) -> Any:
    """See `roseinfer.integrations.ray.app`. The environment of the cluster must enable HAProxy."""
    from roseinfer.integrations.ray.application import application
    from roseinfer.integrations.ray.directory import start_directory

    given = OPTIONS.read_values(arguments, "args")
    plan = _checked(_plan(OPTIONS.build(DeployConfig, given), given, os.environ))
    start_directory()
    return application(plan)


def _manifests(kind: str, given: Mapping[str, Any]) -> str:
    """Return the manifests for `--print`. Raise `ConfigError` for options that they cannot express."""
    from roseinfer.integrations.manifests import check_printable, manifests

    check_printable(kind, given)
    own = {option.name for option in DEPLOYMENT.options()}
    options = dict(given)
    if kind == RAY_SERVICE:
        device = given.get("device", "auto")
        options |= {"bind": "0.0.0.0", "device": "cuda" if device == "auto" else device}
    plan = _plan(OPTIONS.build(DeployConfig, options), options, {})
    flags = [flag for name in given if name not in own for flag in OPTIONS.options[name].as_flags(given[name])]
    kept = {name: value for name, value in options.items() if name not in ("print", "image")}
    return manifests(kind, plan, flags, {name: OPTIONS.options[name].as_in_file(kept[name]) for name in kept})


def _checked(plan: Plan) -> Plan:
    """Return the plan with variables of this machine. Raise `ConfigError` if these, or files it names, are invalid."""
    server = with_traces(plan.server, os.environ)
    if server.length_predictor is not None:
        check_predictor(server.length_predictor, plan.engine)
    if server.slo_classes is not None:
        check_classes(server, server.served_model_name or (plan.engine.model.model,))
    hidden = {name: value for name, value in os.environ.items() if name in HIDDEN_VARIABLES or name.startswith("OTEL_")}
    return replace(plan, server=server, variables=hidden)


def _plan(config: DeployConfig, given: Mapping[str, Any], environment: Mapping[str, str]) -> Plan:
    """Return the plan of these options. Raise `ConfigError` for options that work on a single machine only."""
    replicas = ReplicasConfig(**{name: given[name] for name in ("engine_timeout", "drain_timeout") if name in given})
    engine, server = engine_config(OPTIONS, given), with_keys(OPTIONS.build(ServerConfig, given), environment)
    for name, value in (("record", engine.profile.record), ("profile", engine.profile.profile)):
        if value is not None:
            raise ConfigError(f"{name}: engines on Ray write no files; use `roseinfer serve`")
    if len(engine.priced.slow_list) > 1:
        raise ConfigError("slow: engines on Ray all have the same options; use `roseinfer serve`")
    if not server.port:
        raise ConfigError("port cannot be 0: all processes of a deployment must know it")
    if config.print in (None, RAY_SERVICE) and server.port in config.port_range:
        raise ConfigError(f"port: {server.port} is one of engine_ports, {config.engine_ports}")
    return Plan(
        deploy=config, engine=engine, replicas=replicas, router=given.get("router") or DEFAULT_ROUTER, server=server
    )


def _show(status: "DeploymentStatus") -> None:
    print(f"{status.state}: {status.line}")
    for number, address in status.engines:
        print(f"engine {number} at {address}")
    for message in status.messages:
        print(message)


def _greeting(plan: Plan) -> str:
    host = "127.0.0.1" if plan.deploy.bind in ALL_ADDRESSES else plan.deploy.bind
    url = f"http://[{host}]:{plan.server.port}" if ":" in host else f"http://{host}:{plan.server.port}"
    where = f"{url} and on port {plan.server.port} of every node" if plan.deploy.bind in ALL_ADDRESSES else url
    return f"{plan.engine.model.model} is served on {where}; `roseinfer deploy --status` shows its status"
