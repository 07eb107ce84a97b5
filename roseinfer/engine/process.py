"""Process of an engine: build the engine, and serve it until it is shut down or its owner has ended."""

import logging
import select
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from roseinfer.core.clock import MonotonicClock
from roseinfer.core.errors import RoseinferError
from roseinfer.core.garbage import IdleGarbageCollector
from roseinfer.core.progress import listening
from roseinfer.core.promise import Promise
from roseinfer.core.stacks import enable_stack_dumps, stacks_path
from roseinfer.engine.build import build_engine
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import Ready, StartFailed
from roseinfer.engine.process_transport import ENGINE_ROWS, EngineBoot, PeerBoot
from roseinfer.engine.sockets import ClientSockets, PeerSource
from roseinfer.processes.child import ErrorReport, exit_with_parent, ignore_terminal_signals, read_boot
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.processes.start_log import LoggedStages
from roseinfer.ranks.other_ranks import RankHost
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.idle_audit import IdleAudit

log = logging.getLogger("roseinfer.engine")

# Time for an engine to end by itself after its owner has ended.
EXIT_TIMEOUT_S = 5.0
LAST_MESSAGES_TIMEOUT_S = 1.0
# The kernel closes the descriptors of a killed owner one after the other, within this time.
OWNER_CLOSES_S = 1.0


def main(peers_from: Callable[[PeerBoot], PeerSource] | None = None) -> int:
    """Serve an engine until it is shut down, or until its owner has ended. Standard input: an `EngineBoot`.

    `peers_from`: creates the source of connections from other hosts, for an engine that accepts them.
    """
    ignore_terminal_signals()
    boot = read_boot(EngineBoot)
    boot.log.apply(engine=boot.index if boot.config.engines > 1 else None)
    folder = Path(boot.folder)
    enable_stack_dumps(stacks_path(folder, boot.index))
    # A dead owner cannot remove its folder. The loop notices its end too, but not during a step that hangs.
    exit_with_parent(EXIT_TIMEOUT_S, partial(shutil.rmtree, folder, ignore_errors=True))
    clients = ClientSockets(socket.socket(fileno=boot.listener))
    try:
        return _serve(boot, clients, peers_from)
    finally:
        orphaned = not clients.owned and _owner_has_gone(sys.stdin.fileno())
        clients.close(LAST_MESSAGES_TIMEOUT_S)
        if orphaned:
            shutil.rmtree(folder, ignore_errors=True)


def _serve(boot: EngineBoot, clients: ClientSockets, peers_from: Callable[[PeerBoot], PeerSource] | None) -> int:
    def start_failed(error: BaseException) -> None:
        report = ErrorReport.of(error)
        clients.greet(StartFailed(report.kind, report.message))

    rank_host = RankHost(Path(boot.folder), boot.index, several=boot.config.engines > 1, report_error=start_failed)
    try:
        if boot.peers is not None and peers_from is not None:
            clients.accept_peers(peers_from(boot.peers))
        rows = None if boot.rows is None else SharedRows.open(Path(boot.rows), ENGINE_ROWS)
        with listening(LoggedStages()):
            learnt = None if boot.costs is None else CostParams.of(boot.costs)
            core, info = build_engine(boot.config, Path(boot.model_folder), learnt=learnt, rank_host=rank_host)
    except RoseinferError as error:
        start_failed(error)
        return 1
    except Exception as error:
        log.exception("the engine failed to start")
        start_failed(error)
        return 1
    clock = MonotonicClock()
    garbage = IdleGarbageCollector(clock)
    clients.greet(Ready(info))
    audit = IdleAudit(core.scheduler, clock) if boot.config.scheduler.idle_checks else None
    return 0 if EngineLoop(core, clients, clients, clock, garbage, audit, _publisher(boot, rows, clients)).run() else 1


def _publisher(
    boot: EngineBoot, rows: SharedRows[Promise] | None, clients: ClientSockets
) -> Callable[[Promise], None] | None:
    """Return the function that publishes the engine's promises: to shared memory and to clients on other hosts."""
    if rows is None:
        return None
    write: Callable[[Promise], None] = partial(rows.write, boot.index)
    if boot.peers is None:
        return write

    def publish(promise: Promise) -> None:
        write(promise)
        clients.publish(promise)

    return publish


def _owner_has_gone(stdin: int) -> bool:
    """True if the owner has ended and so cannot remove its folder, which other engines may use too."""
    ends = select.poll()
    ends.register(stdin, select.POLLIN)
    return bool(ends.poll(OWNER_CLOSES_S * 1000))


if __name__ == "__main__":
    sys.exit(main())
