"""Run the command line as a child of `own_server`: it drains and exits with its parent, even after `kill -9`."""

import os
import runpy
import signal
from functools import partial

from roseinfer.processes.child import exit_with_parent

DRAIN_TIMEOUT_S = 60.0

if __name__ == "__main__":
    exit_with_parent(DRAIN_TIMEOUT_S, partial(os.kill, os.getpid(), signal.SIGTERM))
    runpy.run_module("roseinfer.cli", run_name="__main__", alter_sys=True)
