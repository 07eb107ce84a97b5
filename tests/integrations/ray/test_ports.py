"""Ports are checked before a deployment starts."""

import socket

from benchmarks.gpu_server import free_port
from roseinfer.integrations.ray.ports import NeededPort, unusable_ports


def test_ports_in_use_and_addresses_of_other_machines_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = [NeededPort("127.0.0.1", port, "--port"), NeededPort("0.0.0.0", port, "--port")]
        foreign = NeededPort("198.51.100.1", free_port(), "--port")
        found = unusable_ports([*taken, NeededPort("127.0.0.1", free_port(), "--port"), foreign])
    assert [needed for needed, _ in found] == [*taken, foreign]
    assert [reason for _, reason in found][:2] == ["is in use"] * 2 and "Cannot assign" in found[2][1]


def test_a_port_with_connections_that_have_just_ended_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()  # it waits in TIME_WAIT
        client.close()
    assert unusable_ports([NeededPort("127.0.0.1", port, "--port")]) == []
