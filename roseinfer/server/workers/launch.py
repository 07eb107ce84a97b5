"""Starting a worker process, and what the manager holds of it."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable

import msgspec

from roseinfer.server.workers.control import ControlChannel, FromManager, FromWorker, WorkerBoot
from roseinfer.server.workers.handover import ConnectionSender

Boot = Callable[[int, int, int, int], WorkerBoot]


class WorkerProcess:
    """A worker as the manager sees it. `index`: its place among the workers; `number`: no other worker's, ever.

    `serving`: it takes connections; `up`: and requests; `idle`: it drains, and has no request left; `quiet`: its event
    loop has not turned lately; `hung`: nor for so long that it has been killed.
    """

    def __init__(self, index: int, number: int, connections: ConnectionSender) -> None:
        self.index = index
        self.number = number
        self.connections = connections
        self.process: asyncio.subprocess.Process
        self.channel: ControlChannel[FromManager, FromWorker]
        self.serving = self.up = self.idle = self.quiet = self.hung = False

    def send(self, message: FromManager) -> None:
        self.channel.send(message)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def close(self) -> None:
        """Let go of what is left of a process that has ended."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.channel.close()
        self.connections.close()


class Launcher:
    """Starts workers. `boot(index, number, control, connections)` is what a new one is told; it inherits `counters`."""

    def __init__(self, boot: Boot, counters: int) -> None:
        self._boot = boot
        self._counters = counters

    async def launch(
        self, index: int, number: int, on_message: Callable[[WorkerProcess, FromWorker], None]
    ) -> WorkerProcess:
        """Raises `OSError` if there is no process, memory or descriptor for it; then nothing is left of the attempt."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as given:
            control, its_control = _pair(undo, given)
            connections, its_connections = _pair(undo, given)
            worker = WorkerProcess(index, number, ConnectionSender(connections))
            worker.channel = ControlChannel(FromWorker, lambda message: on_message(worker, message), lambda: None)
            await worker.channel.open(control)
            undo.callback(worker.channel.close)
            ends = (its_control.fileno(), its_connections.fileno())
            worker.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "roseinfer.server.workers.worker",
                stdin=asyncio.subprocess.PIPE,
                pass_fds=(*ends, self._counters),
            )
            undo.pop_all()
            # The pipe stays open: its end tells the worker that we are gone.
            assert worker.process.stdin is not None
            worker.process.stdin.write(msgspec.json.encode(self._boot(index, number, *ends)) + b"\n")
        return worker


def _pair(undo: contextlib.ExitStack, given: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets: ours, closed if the launch fails, and the worker's, closed here in any case."""
    ours, its = socket.socketpair()
    undo.callback(ours.close)
    given.callback(its.close)
    return ours, its
