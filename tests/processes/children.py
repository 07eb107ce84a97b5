"""Children for tests of the process kit; none imports torch. Run with -m and the name of what it is to do."""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from roseinfer.processes.child import (
    LogSettings,
    die_with_parent_thread,
    exit_with_parent,
    ignore_terminal_signals,
    read_boot,
    take_stdout,
)
from roseinfer.processes.frames import frame

MODULE = "tests.processes.children"


class Boot(msgspec.Struct):
    """`folder`: where the child writes `up` once it works, and `orphaned` when its parent has gone."""

    folder: str
    log: LogSettings
    text: str = ""


def main() -> int:
    task = sys.argv[1]
    if task == "exit":
        return 3
    if task == "frames":
        results = take_stdout()
        print("other output", flush=True)
        os.write(results, frame(b"result"))
        return 0
    ignore_terminal_signals()
    if task == "die-with-parent":
        die_with_parent_thread()
    boot = read_boot(Boot)
    boot.log.apply()
    folder = Path(boot.folder)
    if task == "hang":  # as a step that never ends; only the watch can end it
        exit_with_parent(0.05, lambda: (folder / "orphaned").touch())
    (folder / "up.new").write_text(f"{os.getpid()} {boot.text}")
    (folder / "up.new").rename(folder / "up")
    if task == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "until-eof":
        sys.stdin.buffer.read()
        return 0
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
