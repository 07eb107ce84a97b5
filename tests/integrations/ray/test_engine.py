"""Ports of engines of a deployment that share a machine."""

import asyncio
import socket

import pytest

from roseinfer.cluster.remote import tcp
from roseinfer.cluster.remote.address import HostPort
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.integrations.ray.engine import launch_on_free_port

HOST = "127.0.0.1"


class ListeningServer:
    """Stand-in for `EngineServer` that only listens. Others may start between its creation and its launch."""

    def __init__(self, bind: HostPort) -> None:
        self.bind = bind

    async def launch(self) -> HostPort:
        await asyncio.sleep(0)
        self.listener = tcp.listen(self.bind)
        return tcp.bound(self.listener)


def free_ports(count: int) -> range:
    """Return consecutive free ports."""
    for low in range(20000, 30000, count):
        listeners = []
        try:
            for port in range(low, low + count):
                listeners.append(socket.create_server((HOST, port)))
            return range(low, low + count)
        except OSError:
            continue
        finally:
            for listener in listeners:
                listener.close()
    raise AssertionError("all ports are taken")


def test_engines_that_start_together_take_one_port_each() -> None:
    ports = free_ports(3)

    async def start(count: int) -> list[tuple[ListeningServer, HostPort]]:
        return list(await asyncio.gather(*(launch_on_free_port(ListeningServer, HOST, ports) for _ in range(count))))  # type: ignore[arg-type]

    started = asyncio.run(start(3))
    assert sorted(address.port for _, address in started) == list(ports)
    with pytest.raises(ResourceError, match=f"no port of {ports[0]}-{ports[-1]} is free on {HOST}.*--engine-ports"):
        asyncio.run(start(1))
    for server, _ in started:
        server.listener.close()


def test_another_error_of_listening_is_raised_at_once() -> None:
    with pytest.raises(ConfigError, match="assign"):
        asyncio.run(launch_on_free_port(ListeningServer, "192.0.2.1", range(20000, 20002)))  # type: ignore[arg-type]
