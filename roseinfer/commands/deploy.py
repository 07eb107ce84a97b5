"""roseinfer deploy: engines and API processes on a Ray cluster."""

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roseinfer.commands.groups import ENGINE, engine_config
from roseinfer.commands.serve import with_keys
from roseinfer.core.config import DEFAULT_ROUTER, ReplicasConfig, ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.deploy.plan import EVERYWHERE, DeployConfig, Plan
from roseinfer.options import Group, OptionParser, OptionSet
from roseinfer.router.registry import ROUTERS

if TYPE_CHECKING:
    from roseinfer.deploy.cluster import Standing

NAME = "deploy"
HELP = "serve a model with engines on a Ray cluster"
# Of `serve`: of these the deployment has options of its own, or places of its own.
NOT_OURS = frozenset({"replicas", "devices", "engines", "secret_file"})
ENGINES = Group(ReplicasConfig, "routing", skip=NOT_OURS, choices={"router": ROUTERS})
SERVER = Group(ServerConfig, "server", skip=frozenset({"host", "api_workers", "worker_timeout"}))
OPTIONS = OptionSet(*ENGINE, Group(DeployConfig, "deployment"), ENGINES, SERVER)


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    from roseinfer.deploy import cluster

    given = OPTIONS.read(args)
    config = OPTIONS.build(DeployConfig, given)
    if config.status or config.down:
        cluster.connect(config.address)
        if config.down:
            cluster.down()
            print("roseinfer is no longer deployed")
        else:
            _show(cluster.status())
        return 0
    plan = _plan(config, given)
    cluster.require_ray()
    cluster.connect(config.address, cluster.environment(plan))
    cluster.deploy(cluster.check(plan), print)
    print(_greeting(plan))
    return 0


def _plan(config: DeployConfig, given: Mapping[str, Any]) -> Plan:
    """Raises `ConfigError` for what there is on one machine only."""
    replicas = ReplicasConfig(**{name: given[name] for name in ("engine_timeout", "drain_timeout") if name in given})
    engine, server = engine_config(OPTIONS, given), with_keys(OPTIONS.build(ServerConfig, given), os.environ)
    for name, value in (("record", engine.profile.record), ("profile", engine.profile.profile)):
        if value is not None:
            raise ConfigError(f"{name}: engines on Ray write no files; use `roseinfer serve`")
    if len(engine.priced.slow_list) > 1:
        raise ConfigError("slow: engines on Ray are all alike; use `roseinfer serve`")
    if not server.port:
        raise ConfigError("port: all processes of a deployment must know it, so it cannot be 0")
    return Plan(
        deploy=config, engine=engine, replicas=replicas, router=given.get("router") or DEFAULT_ROUTER, server=server
    )


def _show(standing: "Standing") -> None:
    print(f"{standing.state}: {standing.line}")
    for number, address in standing.engines:
        print(f"engine {number} at {address}")
    for message in standing.messages:
        print(message)


def _greeting(plan: Plan) -> str:
    host = "127.0.0.1" if plan.deploy.bind in EVERYWHERE else plan.deploy.bind
    url = f"http://[{host}]:{plan.server.port}" if ":" in host else f"http://{host}:{plan.server.port}"
    where = f"{url} and on port {plan.server.port} of every node" if plan.deploy.bind in EVERYWHERE else url
    return f"{plan.engine.model.model} is served on {where}; `roseinfer deploy --status` says how it does"
