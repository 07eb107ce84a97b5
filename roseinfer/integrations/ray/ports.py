"""Ports that a deployment needs on each node, and a check before the start that they are free."""

import errno
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from roseinfer.core.errors import ResourceError
from roseinfer.integrations.ray.plan import ALL_ADDRESSES, Plan

CHECK_TIMEOUT_S = 60.0  # for all nodes: each may have to start a process first


class NeededPort(NamedTuple):
    """Port on which a process of the deployment will listen. `option`: what sets it."""

    host: str
    port: int
    option: str


def needed_ports(plan: Plan) -> list[NeededPort]:
    """Return the ports of HAProxy and of Ray Serve's own proxy, with those that variables of this process set."""
    from ray.serve._private import constants

    bind = plan.deploy.bind
    own = "127.0.0.1" if bind in ALL_ADDRESSES else bind
    return [
        NeededPort(bind, plan.server.port, "--port"),
        NeededPort(bind, constants.RAY_SERVE_FALLBACK_PROXY_HTTP_PORT, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"),
        NeededPort(own, constants.RAY_SERVE_HAPROXY_METRICS_PORT, "RAY_SERVE_HAPROXY_METRICS_PORT"),
        NeededPort(own, constants.RAY_SERVE_HAPROXY_STATS_PORT, "RAY_SERVE_HAPROXY_STATS_PORT"),
    ]


def unusable_ports(ports: Sequence[NeededPort]) -> list[tuple[NeededPort, str]]:
    """Return the ports of this machine on which nothing can listen now, with the reason."""
    found = []
    for needed in ports:
        try:
            with socket.socket(socket.AF_INET6 if ":" in needed.host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as HAProxy: closed connections may linger
                probe.bind((needed.host, needed.port))
                probe.listen(1)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            found.append((needed, "is in use" if taken else f"cannot be used ({os.strerror(error.errno or 0)})"))
    return found


def check_ports(plan: Plan) -> None:
    """Raise `ResourceError` if a port is in use on a node where HAProxy may run."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ports = needed_ports(plan)
    probe = ray.remote(num_cpus=0, max_retries=0)(unusable_ports)
    probes = {
        node["NodeManagerAddress"]: probe.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(ports)
        for node in ray.nodes()
        if node["Alive"]
    }
    found = dict(zip(probes, ray.get(list(probes.values()), timeout=CHECK_TIMEOUT_S), strict=True))
    for address, unusable in found.items():
        for needed, reason in unusable:
            node = f" of node {address}" if len(found) > 1 else ""
            raise ResourceError(
                f"port {needed.port} at {needed.host}{node} {reason}; stop the process that listens there, "
                f"or set another port with {needed.option}"
            )
