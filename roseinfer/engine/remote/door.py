"""How a connection from another host gets to the engine's process: its descriptor is passed on, with its keys.

The engine then reads and writes the connection itself, so that a token takes no further hop.
"""

import contextlib
import socket

from roseinfer.engine.remote.sealed import KEY_BYTES, Keys

# One connection: all that is read together with one descriptor.
_RECORD_BYTES = 2 * KEY_BYTES


def door() -> tuple[socket.socket, socket.socket]:
    """The keeper's end and the engine's."""
    outside, inside = socket.socketpair()
    outside.setblocking(False)
    return outside, inside


def pass_on(outside: socket.socket, connection: socket.socket, keys: Keys) -> bool:
    """`keys`: of the engine's end. False if the engine has taken so few lately that there is no room, or is gone.

    The caller's own copy of `connection` is still to be closed.
    """
    try:
        socket.send_fds(outside, [keys.sending + keys.receiving], [connection.fileno()])
    except OSError:
        return False
    return True


def take_peers(inside: socket.socket) -> list[tuple[socket.socket, Keys]]:
    """The connections that have been passed on. One for which this process has no descriptor left is lost."""
    taken = []
    with contextlib.suppress(OSError):  # there is no more, or the keeper is gone, as is noticed elsewhere
        while True:
            record, descriptors, _, _ = socket.recv_fds(inside, _RECORD_BYTES, 1)
            if len(record) < _RECORD_BYTES:
                break
            keys = Keys(record[:KEY_BYTES], record[KEY_BYTES:])
            taken += [(socket.socket(fileno=descriptor), keys) for descriptor in descriptors]
    return taken
