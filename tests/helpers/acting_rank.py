"""Process of a rank without a model or torch, which does what MODEL names. Run with -m, as a real one.

garbles: sends an invalid status; fails: reports a typed error; breaks: reports any other; lingers: as breaks, but does
not end; dies: is killed after its status; stays: never ends.
"""

import os
import time

from roseinfer.core.errors import ConfigError
from roseinfer.processes.child import ignore_terminal_signals, read_boot, take_stdout
from roseinfer.processes.frames import frame
from roseinfer.ranks.boot import RankBoot, RankStatus
from roseinfer.ranks.process import send_status
from roseinfer.ranks.ring import RingReader

MODULE = "tests.helpers.acting_rank"


def main() -> int:
    ignore_terminal_signals()
    status = take_stdout()
    boot = read_boot(RankBoot)
    act = boot.config.model.model
    if act == "garbles":
        os.write(status, frame(b"what?"))
        return 1
    if act == "fails":
        send_status(status, RankStatus.of(ConfigError("max_model_len is too much for this rank")))
        return 1
    if act in ("breaks", "lingers"):
        send_status(status, RankStatus.of(RuntimeError("no more")))
        time.sleep(600 if act == "lingers" else 0)
        return 1
    send_status(status, RankStatus())
    if act == "stays":
        time.sleep(600)
    if act == "dies":
        time.sleep(0.3)
        os.kill(os.getpid(), 9)
    with RingReader(boot.ring, boot.wake_pipe, boot.rank - 1, boot.size - 1, boot.ring_bytes, 0.0) as ring:
        while ring.read()[0] != 4:
            pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
