"""Launch of a worker process, and the manager's record of it."""

import contextlib
import socket
from collections.abc import Callable

from roseinfer.processes.channel import MessageChannel
from roseinfer.processes.launch import ChildProcess, launch
from roseinfer.server.workers.handover import ConnectionSender
from roseinfer.server.workers.messages import FromManager, FromWorker, WorkerBoot

MODULE = "roseinfer.server.workers.worker"

# Returns the boot struct of a worker from its index, its number and the descriptors of its sockets.
MakeBoot = Callable[[int, int, int, int], WorkerBoot]


class WorkerProcess:
    """The manager's record of a worker. `index`: its place among the workers; `number`: unique among all ever started.

    `serving`: it takes connections; `up`: and requests; `chats`: its model has a chat template; `idle`: it drains and
    has no request left; `late`: its heartbeat is late, so it gets no connections; `timed_out`: it was killed for that.
    """

    def __init__(self, index: int, number: int, connections: ConnectionSender) -> None:
        self.index = index
        self.number = number
        self.connections = connections
        self.child: ChildProcess
        self.channel: MessageChannel[FromManager, FromWorker]
        self.serving = self.up = self.chats = self.idle = self.late = self.timed_out = False

    def send(self, message: FromManager) -> None:
        self.channel.send(message)

    def close(self) -> None:
        """Release the pipes and sockets of a process that has ended."""
        self.child.close()
        self.channel.close()
        self.connections.close()


async def launch_worker(
    make_boot: MakeBoot, index: int, number: int, on_message: Callable[[WorkerProcess, FromWorker], None]
) -> WorkerProcess:
    """Launch a worker. Raises `OSError`; then nothing is left of the attempt."""
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as given:
        control, its_control = _socket_pair(undo, given)
        connections, its_connections = _socket_pair(undo, given)
        worker = WorkerProcess(index, number, ConnectionSender(connections))
        worker.channel = MessageChannel(FromWorker, lambda message: on_message(worker, message), lambda: None)
        await worker.channel.open(control)
        undo.callback(worker.channel.close)
        ends = (its_control.fileno(), its_connections.fileno())
        worker.child = launch(MODULE, make_boot(index, number, *ends), pass_fds=ends)
        undo.pop_all()
    return worker


def _socket_pair(undo: contextlib.ExitStack, given: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets: ours, closed by `undo`, and the worker's, closed by `given`."""
    ours, its = socket.socketpair()
    undo.callback(ours.close)
    given.callback(its.close)
    return ours, its
