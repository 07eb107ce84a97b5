"""Standard input, output and error that the caller has closed, or that can no longer be written."""

import os
import sys


def open_missing() -> None:
    """Open closed standard streams on the null device, also for child processes.

    Otherwise the next sockets and files get their numbers, which uvloop refuses to close.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so it is `number`
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode))


def discard_stdout() -> None:
    """Send what is buffered for standard output, and what follows, to the null device.

    Otherwise the flush at the end of the process fails, which changes its exit code.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
