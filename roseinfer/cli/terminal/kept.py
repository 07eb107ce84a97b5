"""Runs the command line for as long as somebody holds the other end of our standard input.

`python -m roseinfer.cli.terminal.kept serve`: however its owner ends, be it by `kill -9`, the server drains and goes.
"""

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    threading.Thread(target=_leave_with_owner, args=(sys.stdin.fileno(),), name="owner-watch", daemon=True).start()
    runpy.run_module("roseinfer.cli", run_name="__main__", alter_sys=True)


def _leave_with_owner(stdin: int) -> None:
    """Reads the descriptor, not the file object, whose lock the interpreter could not take from this thread at exit."""
    while os.read(stdin, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
