"""Run the command line until the other end of standard input closes.

`python -m roseinfer.cli.terminal.kept serve`: the server drains and exits when its owner ends, even by `kill -9`.
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
    """Read the descriptor instead of the file object, whose lock would block the interpreter's exit."""
    while os.read(stdin, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
